"""Frequencies that several hold: a change in place is a change for all of them, as in the stock model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import safe_rope


def frequencies() -> Tensor:
    return 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)


class Full(nn.Module):
    def __init__(self, inv_freq: Tensor | None = None) -> None:
        super().__init__()
        self.base, self.dim = 10000.0, 16
        self.register_buffer("inv_freq", frequencies() if inv_freq is None else inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        phase = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((phase, phase), -1)
        return both.cos(), both.sin()


class Pinned(Full):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        cos, sin = super().forward(x, position_ids)
        return {0: cos, 1: sin}


class Given(nn.Module):
    def __init__(self, cls: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.register_buffer("inv", frequencies(), persistent=False)
        self.first, self.second = cls(self.inv), cls(self.inv)


class Assigned(nn.Module):
    def __init__(self, cls: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.inv = frequencies()
        self.first, self.second = cls(), cls()
        self.first.inv_freq = self.second.inv_freq = self.inv


def guarded(make: Callable[[], nn.Module]) -> Any:
    with safe_rope.guard(tables="fp32"):
        return make()


def protected(make: Callable[[], nn.Module]) -> Any:
    model = make()
    safe_rope.protect(model, tables="fp32")
    return model


X, POSITIONS = torch.zeros(1, 2, 20, 16), torch.arange(20)[None]
HOW = pytest.mark.parametrize("how", [guarded, protected])
CLASS = pytest.mark.parametrize("cls", [Full, Pinned])
HOLDER = pytest.mark.parametrize("holder", [Given, Assigned])
CHANGES = {
    "the parent's": lambda model: model.inv.mul_(0.5),
    "the other's": lambda model: model.first.inv_freq.mul_(0.5),
    "its own": lambda model: model.second.inv_freq.mul_(0.5),
    "twice": lambda model: (
        cosines(model),
        model.inv.mul_(0.5),
        cosines(model),
        model.first.inv_freq.add_(0.1),
    ),
    "another": lambda model: setattr(model.first, "inv_freq", model.inv * 0.5),
    "after a move": lambda model: model.to("cpu").first.inv_freq.mul_(0.5),
    "after a cast": lambda model: model.to(torch.float64).float().first.inv_freq.mul_(0.5),
}


def cosines(model: Any) -> list[Tensor]:
    return [one(X, POSITIONS)[0].clone() for one in (model.first, model.second)]


@pytest.mark.parametrize("change", CHANGES)
@HOLDER
@CLASS
@HOW
def test_a_change_in_place_is_followed_by_all_that_hold_it(
    how: Any, cls: Any, holder: Any, change: str
) -> None:
    models = holder(cls), how(lambda: holder(cls))
    answers = []
    for model in models:
        cosines(model)
        CHANGES[change](model)
        answers.append(cosines(model))
    for true, got in zip(*answers, strict=True):
        assert torch.equal(true, torch.as_tensor(got))


@CLASS
@HOW
def test_a_change_of_an_array_is_followed(how: Any, cls: Any) -> None:
    array = frequencies().numpy().copy()
    model = how(lambda: nn.ModuleDict({"first": cls(torch.from_numpy(array))}))
    model["first"](X, POSITIONS)
    array *= np.float32(0.5)
    got = model["first"](X, POSITIONS)[0]
    assert torch.equal(torch.as_tensor(got), cls(torch.from_numpy(array))(X, POSITIONS)[0])


@HOLDER
@CLASS
def test_what_is_shared_is_not_rounded(cls: Any, holder: Any) -> None:
    model, expected = guarded(lambda: holder(cls)).to(torch.bfloat16), cosines(holder(cls))
    for true, got in zip(expected, cosines(model), strict=True):
        assert torch.equal(true, torch.as_tensor(got))
