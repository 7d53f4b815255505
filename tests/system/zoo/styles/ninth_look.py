"""Styles of a ninth look: numbers from Python's own modules, and modules that set what they have built."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, style

HALF = DIM // 2


def _frequencies(base: float = 10000.0) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, DIM, 2).float() / DIM)


def _waves(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    phase = torch.arange(x.shape[1], device=x.device)[:, None] * inv_freq.float()
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class _Kept(nn.Module):
    """Registers the frequencies that its subclass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", self.make(), persistent=False)

    def make(self) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Pair:
        return _waves(self.rates, x)


@style("python", inv_freq="rates", exact=half_width)
class UnpackedFromBytes(_Kept):
    """Numbers from a packed string of bytes."""

    def make(self) -> torch.Tensor:
        packed = struct.pack(f"{HALF}f", *(10000.0 ** (-i / HALF) for i in range(HALF)))
        return torch.frombuffer(bytearray(packed), dtype=torch.float32)


@style("numpy", inv_freq="rates", exact=half_width)
class ByAUniversalFunction(_Kept):
    """NumPy calls a function of Python for each number."""

    def make(self) -> torch.Tensor:
        rate = np.frompyfunc(lambda i: 10000.0 ** (-i / HALF), 1, 1)
        return torch.as_tensor(rate(np.arange(HALF)).astype(np.float32))


@style("new tensors", inv_freq="rates", exact=half_width)
class NewFromAnEmptyOne(_Kept):
    """An empty tensor says the dtype and the device of all others."""

    def make(self) -> torch.Tensor:
        seed = torch.empty(0)
        return seed.new_full((HALF,), 10000.0) ** -(seed.new_ones(HALF).cumsum(0).sub_(1) / HALF)


@style("one buffer")
class ViewsOfOneBuffer(nn.Module):
    """Frequencies and positions are views of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.cat((_frequencies(), torch.arange(LONGEST).float()))
        self.register_buffer("constants", both, persistent=False)

    @property
    def rates(self) -> torch.Tensor:
        return self.constants[:HALF]

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.constants[HALF : HALF + x.shape[1], None].float() * self.rates.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def remembers_its_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """As a configuration library decorates constructors."""

    @functools.wraps(init)
    def inner(self: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "arguments", {**kwargs, "args": args})
        init(self, *args, **kwargs)

    return inner


@style("decorated", inv_freq="rates", exact=half_width)
class DecoratedConstructor(nn.Module):
    """Its constructor is a wrapper that notes what it is called with."""

    @remembers_its_arguments
    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("rates", 1 / base ** (torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _waves(self.rates, x)


@style("by steps", shows="output", roundings=4)
class RotatedByWeightsWithNtk(nn.Module):
    """An attention's projection, and dynamic NTK: a long call sets other frequencies for all that follow."""

    def __init__(self, longest: int = 200) -> None:
        super().__init__()
        self.longest = longest
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.longest:
            self.inv_freq, self.longest = _frequencies(20000.0), LONGEST
        cos, sin = _waves(self.inv_freq, x)
        first, second = self.proj(x).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
