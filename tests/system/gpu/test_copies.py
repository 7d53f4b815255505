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
