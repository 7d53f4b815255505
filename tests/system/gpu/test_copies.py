"""A protected model on a device, and copies of it: each table is where stock has it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.devices import DEVICE, is_there
from torch import Tensor, nn

import safe_rope

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_there(), reason="needs a CUDA device")]


class MovesAttributes(nn.Module):
    """Tables that are attributes, and move with the module."""

    def __init__(self) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(8.0) / 8))
        self.cos, self.sin = phases.cos(), phases.sin()

    def _apply(self, fn: Any, recurse: bool = True) -> MovesAttributes:
        super()._apply(fn, recurse)
        self.cos, self.sin = fn(self.cos), fn(self.sin)
        return self

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[:rows], self.sin[:rows]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class TwoPlaces(nn.Module):
    """A table that moves with the module, and one that stays on the CPU."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(16.0) / 16))
        self.register_buffer("cos", phases.cos())
        self.register_buffer("sin", phases.sin())

    def _apply(self, fn: Any, recurse: bool = True) -> TwoPlaces:
        super()._apply(fn, recurse)
        self.sin = self.sin.cpu()
        return self

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[-2], device="cpu")
        return x * self.cos[: len(rows)] + self.sin[rows].to(x.device)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("style", [MovesAttributes, TwoPlaces])
def test_a_copy_is_where_the_model_is(
    style: type[nn.Module], copied: Callable[[nn.Module], nn.Module]
) -> None:
    x = torch.rand(2, 12, 16)
    expected = style()(x)
    stock = copied(style().to(DEVICE))
    with safe_rope.guard():
        model = style()
    model.to(DEVICE)
    torch.testing.assert_close(model(x.to(DEVICE)).cpu(), expected)
    other = copied(model)
    for name in ("cos", "sin"):
        assert getattr(other, name).device == getattr(stock, name).device, name
    torch.testing.assert_close(other(x.to(DEVICE)).cpu(), expected)


class Phases(nn.Module):
    """Phases that somebody else keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(16.0) / 16))

    def forward(self, length: int) -> Tensor:
        counts = torch.arange(length, dtype=self.inv_freq.dtype, device=self.inv_freq.device)
        return torch.outer(counts, self.inv_freq)


class KeepsPhases(nn.Module):
    """Keeps, for later calls, what a part of it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("kept", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.rope(x.shape[1])
        return self.layer(x) * self.kept.cos()


@torch.no_grad()
def test_phases_that_a_parent_keeps_stay_exact_where_they_are_moved_before_a_cast() -> None:
    x, stock = torch.rand(1, 900, 16), KeepsPhases()
    with safe_rope.guard():
        model = KeepsPhases()
    model.load_state_dict(stock.state_dict())
    expected = stock(x)
    model(x)
    got = model.to(DEVICE).to(torch.bfloat16)(x.to(DEVICE, torch.bfloat16))
    assert (got.device.type, got.dtype) == (DEVICE, torch.bfloat16)
    assert (got.cpu().float() - expected).abs().max() < 2**-5
