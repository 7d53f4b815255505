"""A class that copies itself: its copies are protected, or run as in stock, and none raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

DIM = 32
LENGTH = 600


class Rope(nn.Module):
    """Frequencies in a buffer."""

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("inv_freq", base ** -(torch.arange(0, DIM, 2).float() / DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.arange(x.shape[1]).float()[:, None] * self.inv_freq.float()
        return phase.cos().to(x.dtype)


class CopiesByHand(Rope):
    """A new object, of which torch's constructor and the copied tensors make a module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        other.base = self.base
        other.register_buffer("inv_freq", self.inv_freq.detach().clone())
        return other


class BuildsAnew(Rope):
    """The constructor, once more."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self.base)


class CopiesHalfSpeed(CopiesByHand):
    """A copy on purpose with other frequencies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = super().__deepcopy__(memo)
        other.inv_freq.mul_(0.5)
        return other


class CopiesHalfWidth(CopiesByHand):
    """A copy with half as many frequencies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = super().__deepcopy__(memo)
        other.inv_freq = other.inv_freq[: DIM // 4].clone()
        return other


@pytest.mark.parametrize("cls", [CopiesByHand, BuildsAnew, CopiesHalfSpeed])
@torch.no_grad()
def test_a_copy_that_a_class_makes_by_itself_keeps_its_tables(cls: type[Rope]) -> None:
    """The first raised AttributeError, and the second lost its protection."""
    x = torch.zeros(1, LENGTH, DIM)
    true = copy.deepcopy(cls())(x)
    stock = copy.deepcopy(cls().to(torch.bfloat16)).state_dict()
    with safe_rope.guard():
        model = cls()
    for one in (copy.deepcopy(model).to(torch.bfloat16), copy.deepcopy(model.to(torch.bfloat16))):
        got = one(x.bfloat16())
        assert got.dtype == torch.bfloat16
        assert float((got.double() - true.double()).abs().max()) < 2**-8
    assert one.state_dict()["inv_freq"].dtype == stock["inv_freq"].dtype


@torch.no_grad()
def test_a_copy_with_tables_of_another_shape_is_as_in_stock() -> None:
    """Nothing is known of its tables."""
    x = torch.zeros(1, LENGTH, DIM)
    with safe_rope.guard():
        model = CopiesHalfWidth()
    assert torch.equal(copy.deepcopy(model)(x), copy.deepcopy(CopiesHalfWidth())(x))


class MadeByForward(CopiesByHand):
    """Its frequencies come with the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = type(self).__new__(type(self))
        nn.Module.__init__(other)
        other.base = self.base
        kept = self.inv_freq
        other.register_buffer("inv_freq", None if kept is None else kept.detach().clone())
        return other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inv_freq is None:
            self.inv_freq = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        return super().forward(x)


@torch.no_grad()
def test_a_copy_before_the_first_call_awaits_its_tables() -> None:
    """There is no table yet."""
    x = torch.zeros(1, LENGTH, DIM)
    with safe_rope.guard():
        model = MadeByForward()
    for one in (copy.deepcopy(model), model):
        one(x)
        got = copy.deepcopy(one).to(torch.bfloat16)(x.bfloat16())
        assert float((got.double() - MadeByForward()(x).double()).abs().max()) < 2**-8
