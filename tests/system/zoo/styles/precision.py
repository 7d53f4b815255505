"""Numbers that are kept in few bits on purpose, or computed in a dtype that is set for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import cos_and_sin as _rotated
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, LONGEST, style


@style("buffer", "unharmed", not_on=("meta",))
class FixedPoint(nn.Module):
    """Sines as 16-bit integers."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("sines", (phases.sin() * 32767).round().to(torch.int16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sines[: x.shape[1]].float().div(32767).to(x.dtype)


def _phases(dim: int = DIM) -> torch.Tensor:
    return torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))


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


@style("fp16 on purpose")
class HalfOnPurpose(nn.Module):
    """Its author casts the frequencies to FP16 and computes with them so."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim).half().float(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("fp16 on purpose")
class KeptInHalf(nn.Module):
    """Tables are cast to FP16 by the author, and read as FP32."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.cos, self.sin = phase.cos().half(), phase.sin().half()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].float().to(x.dtype), self.sin[: x.shape[1]].float().to(x.dtype)


@style("numpy", "float16 on purpose")
class HalfInNumpy(nn.Module):
    """Its author rounds a NumPy table to float16 and keeps that."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = np.outer(np.arange(LONGEST), 1e4 ** -(np.arange(0, dim, 2) / dim))
        table = np.concatenate((np.cos(phase), np.sin(phase)), 1).astype(np.float16)
        self.register_buffer("table", torch.from_numpy(table), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


@style("formula", inv_freq="inv_freq", exact=half_width)
class InFloat64(nn.Module):
    """Phases in float64 from FP32 frequencies."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * self.inv_freq.double()
        return _rotated(phase, x)


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
