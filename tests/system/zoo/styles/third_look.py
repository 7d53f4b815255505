"""Styles of a third look at other people's code: own moves, arrays, small integers, parametrized buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, style


def _frequencies(dim: int = DIM) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def _phases(dim: int = DIM) -> torch.Tensor:
    return torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))


@style("own _apply", inv_freq="inv_freq", exact=half_width)
class TakenAsideByItsApply(nn.Module):
    """Its table is in no dictionary while torch casts the rest."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        table = self._buffers.pop("inv_freq")
        super()._apply(fn, recurse)
        self._buffers["inv_freq"] = table
        return self

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def _numpy_phases(dim: int = DIM) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.outer(np.arange(LONGEST), 10000 ** -(np.arange(0, dim, 2) / dim))


@style("numpy", "phases")
class ArrayOfPhases(nn.Module):
    """NumPy's float64 phases become what the activations are before sines are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = _numpy_phases()

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.from_numpy(self.phase[: x.shape[1]]).to(x.dtype)
        return phase.cos(), phase.sin()


@style("numpy", "phases", "buffer")
class BufferOfPhasesFromNumpy(nn.Module):
    """The same in a buffer, which casts round as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.from_numpy(_numpy_phases()), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.phase[: x.shape[1]].to(x.dtype)
        return phase.cos(), phase.sin()


@style("quantised", roundings=2)
class InEightBits(nn.Module):
    """A quantised table and its scales."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = _phases(dim)
        table = torch.cat((phase.cos(), phase.sin()), dim=-1)
        scale = table.abs().amax(0) / 127
        self.register_buffer("quantised", (table / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.quantised[: x.shape[1]].float() * self.scale.float()).to(x.dtype)


class Unchanged(nn.Module):
    """A parametrization that changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x


@style("parametrized", inv_freq="inv_freq", exact=half_width)
class ParametrizedWhileBuilt(nn.Module):
    """Its buffer is what a parametrization makes of another one."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))
        parametrize.register_parametrization(self, "inv_freq", Unchanged())

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("transformer-xl", shows="output", roundings=2)
class CountedBackwardsBesideWeights(nn.Module):
    """Transformer-XL's: positions are counted down in the dtype of the activations."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))
        self.r = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1] - 1, -1, -1.0, dtype=x.dtype)
        phase = torch.outer(positions, self.inv_freq)
        return self.r(torch.cat((phase.sin(), phase.cos()), dim=-1).to(x.dtype))
