"""Styles of a seventh look: what code around positions does with them, and odd ways of computing them."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def _frequencies(dim: int = DIM) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def _turned(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    phase = torch.outer(torch.arange(x.shape[1], device=x.device).float(), inv_freq.float())
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class _Frozen(Mapping[str, torch.Tensor]):
    """A read-only mapping, as of a config library."""

    def __init__(self, **values: torch.Tensor) -> None:
        self._values = values

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@style("mapping")
class InAReadOnlyMapping(nn.Module):
    """A mapping of the author's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = _Frozen(inv_freq=_frequencies())

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.tables["inv_freq"], x)


@style("mapping")
class InAMappingProxy(nn.Module):
    """``types.MappingProxyType`` around a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = types.MappingProxyType({"inv_freq": _frequencies()})

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.tables["inv_freq"], x)


CosSinTuple = namedtuple("CosSinTuple", ["cos", "sin"])


@style("tuple", "returned")
class ReturnsANamedTuple(nn.Module):
    """Returns ``collections.namedtuple`` from buffers."""

    def __init__(self) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies())
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return CosSinTuple(self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype))


@style("dict", "returned", inv_freq="inv_freq")
class ReturnsADict(nn.Module):
    """Returns a dictionary of tables by kind of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        cos, sin = _turned(self.inv_freq, x)
        short, _ = _turned(self.inv_freq / 4, x)
        return OrderedDict(cos=cos, sin=sin, short=short)


@style("context manager", inv_freq="inv_freq", exact=half_width)
class WithAutocastDisabled(nn.Module):
    """transformers' own guard: autocast off, FP32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        with torch.autocast("cpu", enabled=False):
            freqs = self.inv_freq.float()[:, None] @ torch.arange(x.shape[1]).float()[None]
            return freqs.t().cos().to(x.dtype), freqs.t().sin().to(x.dtype)


@style("context manager")
class InACustomContext(nn.Module):
    """Its tables are made inside of a context manager of its own, which casts back."""

    def __init__(self) -> None:
        super().__init__()
        with self._double():
            phase = torch.outer(torch.arange(LONGEST), 1 / 10000 ** (torch.arange(0, DIM, 2) / DIM))
            table = torch.cat((phase.cos(), phase.sin()), -1).float()
        self.register_buffer("table", table, persistent=False)

    @staticmethod
    @contextlib.contextmanager
    def _double() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


@style("decorated", inv_freq="inv_freq", exact=half_width)
class DecoratedForward(nn.Module):
    """``no_grad`` and a decorator of the author's around forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    @torch.no_grad()
    @functools.wraps(_turned)
    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("slots of a step", inputs=hidden_and_positions, inv_freq="inv_freq")
class PositionsTimesScale(nn.Module):
    """Positions are divided by a number and shifted, as of a resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)
        self.stride, self.offset = 4, 0.5

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        positions = (position_ids[0].to(torch.float32) + self.offset) / self.stride
        phase = positions.unsqueeze(-1) * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("padding", inv_freq="inv_freq")
class PaddedToABlock(nn.Module):
    """The length is rounded up to a multiple of 128; what is over is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        length = (x.shape[1] + 127) // 128 * 128
        phase = torch.arange(length).float()[:, None] * self.inv_freq.float()
        cos, sin = F.pad(phase, (0, 2)).cos(), F.pad(phase, (0, 2)).sin()
        return cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype)


@style("fused", roundings=2)
class RotatesItsInput(nn.Module):
    """x cos + rotate_half(x) sin with tables of the module."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim)).repeat(1, 2)
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        turned = torch.cat((-two, one), -1)
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        return (torch.ones_like(x) * cos), (torch.ones_like(turned) * sin)  # type: ignore[return-value]


@style("numpy", "scalars", inv_freq="inv_freq", exact=half_width)
class NumpyScalarsInTorch(nn.Module):
    """NumPy's numbers among torch's operations."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        log = np.log(np.float64(10000.0)) / np.float64(dim // 2)
        self.register_buffer("inv_freq", torch.exp(torch.arange(dim // 2, dtype=torch.float32) * -log))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("golden ratio", inv_freq="angles", exact=half_width)
class GoldenGate(nn.Module):
    """Golden-gate rope: angles by the golden ratio, magnitudes by a geometric series."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = torch.arange(dim // 2, dtype=torch.float32)
        direction = torch.cos(steps * (math.pi * (math.sqrt(5) - 1) / 2))
        self.register_buffer("angles", direction * 0.5 ** (steps / 2), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.angles, x)


@style("decibels")
class LogSpacedOmega(nn.Module):
    """Log-spaced frequencies by ``torch.logspace`` with a base, as ``omega``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        omega = torch.logspace(0, -4 * (dim - 2) / dim, dim // 2, base=10.0, dtype=torch.float32)
        self.register_buffer("omega", omega, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.omega, x)


@style("nested", "shared", inv_freq="a.inv_freq", exact=half_width)
class OneTableInTwoModules(nn.Module):
    """Two children hold the same buffer object."""

    def __init__(self) -> None:
        super().__init__()
        table = _frequencies()
        self.a, self.b = Given(table), Given(table)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.a(x)[0], self.b(x)[1]


class Given(nn.Module):
    """Registers what it is given."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", table, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("mask", "counts")
class CountsByAMask(nn.Module):
    """Fairseq's: positions from a cumulative sum of a mask, looked up in sinusoids."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        half = dim // 2
        emb = math.log(10000) / (half - 1)
        emb = torch.exp(torch.arange(half, dtype=torch.float) * -emb)
        emb = torch.arange(LONGEST + 2, dtype=torch.float).unsqueeze(1) * emb.unsqueeze(0)
        emb = torch.cat([torch.sin(emb), torch.cos(emb)], dim=1)
        emb[1, :] = 0
        self.weights = emb
        self.register_buffer("_float_tensor", torch.FloatTensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.long)
        positions = mask.cumsum(1) + 1
        self.weights = self.weights.to(self._float_tensor)
        return self.weights.index_select(0, positions.view(-1)).detach().to(x.dtype)


@style("time", "rff")
class RandomFeatureTimes(nn.Module):
    """Random Fourier features of times from a seed: no positions that are counted."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("freqs", torch.randn(dim // 2, generator=generator, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.freqs, x)


@style("cope", shows="output", roundings=4)
class ContextualPositions(nn.Module):
    """CoPE: positions are sums of gates, looked up in a table of sinusoids by interpolation."""

    def __init__(self, dim: int = DIM, longest: int = 64) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("pos_emb", torch.cat((phase.cos(), phase.sin()), -1), persistent=False)
        self.longest = longest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).float().clamp(max=self.longest - 1) / 1.5
        low, high = positions.floor().long(), positions.ceil().long()
        weight = (positions - low)[:, None].to(self.pos_emb.dtype)
        table = self.pos_emb[high] * weight + self.pos_emb[low] * (1 - weight)
        return table.to(x.dtype)


@style("stacked", inv_freq="inv_freq")
class ViewAsComplexOfAStack(nn.Module):
    """``view_as_complex`` of a stack, multiplied in complex and taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        cis = torch.view_as_complex(torch.stack((phase.cos(), phase.sin()), -1).contiguous())
        return torch.view_as_real(cis * torch.ones((), dtype=torch.complex64)).flatten(-2).to(x.dtype)


@style("ema", inv_freq="inv_freq", exact=half_width)
class ScaledByItsOwnBuffer(nn.Module):
    """A second buffer scales the frequencies in place once, at the end of the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)
        self.register_buffer("rope_scale", torch.linspace(1.0, 2.0, DIM // 2), persistent=False)
        self.inv_freq.div_(self.rope_scale)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("parameters", "buffer of a parameter")
class TablesFromParametersData(nn.Module):
    """A frozen parameter's ``data`` is turned into sines in the constructor, and kept beside it."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(LONGEST, dtype=torch.float32), requires_grad=False)
        phase = torch.outer(self.base.data, _frequencies(dim))
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sin[: x.shape[1]].to(x.dtype)
