"""Tables in plain attributes, which no cast of the module reaches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from styles.formulas import Pair, half_width, twice
from styles.registry import DIM, LONGEST, style


@style("attribute", inv_freq="inv_freq", exact=twice)
class InvFreqAttribute(nn.Module):
    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[1], dtype=torch.float32)
        emb = torch.outer(t, self.inv_freq.float()).repeat(1, 2)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


@style("attribute")
class TableAttributes(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        freq = torch.pow(10000.0, -torch.arange(0, dim, 2) / dim)
        phase = torch.arange(length).unsqueeze(1) * freq.unsqueeze(0)
        self.sin, self.cos = torch.sin(phase), torch.cos(phase)

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        return self.cos[:n].type_as(x), self.sin[:n].type_as(x)


class Angles:
    """Where the tables are, no module."""

    __slots__ = ("cos", "inv_freq", "sin")

    def __init__(self, dim: int, length: int) -> None:
        self.inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        phase = torch.outer(torch.arange(length).float(), self.inv_freq)
        self.cos, self.sin = phase.cos(), phase.sin()


@style("attribute", "object", inv_freq="angles.inv_freq", exact=half_width)
class InSlotsOfAnObject(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.angles = Angles(dim, length)

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        return self.angles.cos[:n].to(x.dtype), self.angles.sin[:n].to(x.dtype)


@dataclass
class RotaryTables:
    """What a dataclass holds is no attribute of the module either."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rows(self, count: int, dtype: torch.dtype) -> Pair:
        return self.cos[:count].to(dtype), self.sin[:count].to(dtype)


@style("attribute", "object")
class InADataclass(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        phase = torch.arange(length)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(1e4) / dim))
        self.tables = RotaryTables(cos=phase.cos(), sin=phase.sin())

    def forward(self, x: torch.Tensor) -> Pair:
        return self.tables.rows(x.shape[1], x.dtype)


@style("attribute", "unharmed", "property", inv_freq="inv_freq", exact=half_width)
class ComputedByAProperty(nn.Module):
    """Nothing is kept but numbers."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    @property
    def inv_freq(self) -> torch.Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("attribute", "cached property", inv_freq="inv_freq", exact=half_width)
class CachedProperty(nn.Module):
    """Read once in the constructor, so that it is remembered as it came out there."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        assert self.inv_freq.numel() == dim // 2

    @functools.cached_property
    def inv_freq(self) -> torch.Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2) / self.dim)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("attribute", "private")
class PrivateName(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        inv = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.__phase = torch.arange(length, dtype=torch.float32)[:, None] * inv[None]

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.__phase[: x.shape[1]].float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def rows_of(dim: int, length: int) -> Callable[[int], Pair]:
    """Return a function that has the tables in its closure."""
    inv = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
    phase = torch.arange(0.0, length)[:, None] * inv
    cos, sin = phase.cos(), phase.sin()
    return lambda count: (cos[:count], sin[:count])


@style("attribute", "closure")
class InAClosure(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.rows = rows_of(dim, length)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.rows(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)
