"""Frequencies and phases by other operations than the usual ones."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import cos_and_sin as _rotated
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.formulas import waves as _waves
from styles.registry import DIM, HALF, LONGEST, style


@style("buffer")
class InDegrees(nn.Module):
    """Phases in degrees, made radians when they are used."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("degrees", torch.rad2deg(phases), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _rotated(torch.deg2rad(self.degrees[: x.shape[1]].float()), x)


@style("buffer")
class InTurns(nn.Module):
    """Phases as parts of a whole turn, between 0 and 1."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).double(), _frequencies(dim).double())
        self.register_buffer("turns", (phases / (2 * math.pi) % 1).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _rotated(self.turns[: x.shape[1]].float() * (2 * math.pi), x)


@style("logarithm", inv_freq="inv_freq", exact=half_width)
class ByALogarithmInTorch(nn.Module):
    """``exp`` of a logarithm that torch takes."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        base = torch.tensor(10000.0, dtype=torch.float32)
        inv_freq = torch.exp(-torch.log(base) * torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("logarithm")
class DivTermByALogarithm(nn.Module):
    """The tutorial's, with a logarithm that torch takes, under its usual name."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.float32)
        self.register_buffer("div_term", torch.exp(steps * (-torch.log(torch.tensor([1e4])) / dim)))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.div_term, x)


@style("generator")
class FromAGeneratorFunction(nn.Module):
    """Frequencies are yielded one after the other."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(list(self._series(dim))), persistent=False)

    @staticmethod
    def _series(dim: int) -> Iterator[float]:
        value = 1.0
        for _ in range(dim // 2):
            yield value
            value *= 10000.0 ** (-2.0 / dim)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("operators", inv_freq="inv_freq", exact=half_width)
class ByTheOperatorModule(nn.Module):
    """``operator.pow`` and ``functools.reduce``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = operator.truediv(torch.arange(0, dim, 2, dtype=torch.float32), dim)
        parts = [operator.pow(10000.0, operator.neg(steps)), torch.ones(dim // 2)]
        self.register_buffer("inv_freq", functools.reduce(operator.mul, parts), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("vander", inv_freq="inv_freq", exact=half_width)
class ByVander(nn.Module):
    """Powers of one ratio as a row of a Vandermonde matrix."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        ratio = torch.tensor([10000.0 ** (-2.0 / dim)], dtype=torch.float64)
        powers = torch.vander(ratio, dim // 2, increasing=True)[0].float()
        self.register_buffer("inv_freq", powers, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("cumprod", inv_freq="inv_freq", exact=half_width)
class ByCumprod(nn.Module):
    """A running product of one ratio."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        ratios = torch.full((dim // 2,), 10000.0 ** (-2.0 / dim))
        ratios[0] = 1.0
        self.register_buffer("inv_freq", ratios.cumprod(0), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("in place", inv_freq="inv_freq", exact=half_width)
class DividedInPlace(nn.Module):
    """``arange(...).div_().mul_().exp_()``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.float32).div_(dim).mul_(-math.log(10000.0)).exp_()
        self.register_buffer("inv_freq", steps, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("pow", inv_freq="inv_freq", exact=half_width)
class BaseAsATensor(nn.Module):
    """A tensor is raised to powers, and another of the same size divides."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        base = torch.tensor(10000.0)
        inv_freq = torch.ones(dim // 2) / torch.pow(base, torch.linspace(0, 1 - 2 / dim, dim // 2))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("cumsum", exact=half_width, inv_freq="inv_freq")
class CountedByFullAndCumsum(nn.Module):
    """Positions are a running sum of ones, and buffers too."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("t", torch.full((LONGEST,), 1.0).cumsum(0) - 1, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.einsum("i,j->ij", self.t[: x.shape[1]].float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


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


@style("matrix")
class PowersOfARotation(nn.Module):
    """The matrix that turns by one position, whose powers turn by the others."""

    def __init__(self) -> None:
        super().__init__()
        angles = [1e4 ** (-i / 4) for i in range(4)]
        blocks = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
        self.register_buffer("R", torch.block_diag(*map(torch.tensor, blocks)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = self.R.double()
        turned = [torch.eye(8, dtype=torch.float64)]
        for _ in range(x.shape[1] - 1):
            turned.append(turned[-1] @ step)
        return torch.stack(turned).to(x.dtype)


@style("vmap")
class RowsByVmap(nn.Module):
    """``torch.vmap`` makes the rows: what makes each sees no count."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()

        def row(position: torch.Tensor) -> torch.Tensor:
            phase = position * _frequencies(dim)
            return torch.stack((phase.cos(), phase.sin()))

        self.register_buffer("rows", torch.vmap(row)(torch.arange(LONGEST).float()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows[: x.shape[1]].to(x.dtype)
