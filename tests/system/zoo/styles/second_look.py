"""Styles of a second look at other people's code: bases in tensors, counts in buffers, odd owners."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def _frequencies(dim: int = DIM) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def _rotated(phase: torch.Tensor, x: torch.Tensor) -> Pair:
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("scalar")
class BaseInABuffer(nn.Module):
    """The base is a buffer of no dimension, and 500000 is no BF16 number."""

    def __init__(self, dim: int = DIM, base: float = 500000.0) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("base", torch.tensor(base), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = 1.0 / self.base.float() ** (torch.arange(0, self.dim, 2).float() / self.dim)
        return _rotated(torch.outer(torch.arange(x.shape[1]).float(), inv_freq), x)


@style("scalar")
class ThetaInATensor(nn.Module):
    """The base is a tensor of one element, and no buffer."""

    def __init__(self, dim: int = DIM, theta: float = 1000003.0) -> None:
        super().__init__()
        self.dim = dim
        self.rope_theta = torch.tensor([theta])

    def forward(self, x: torch.Tensor) -> Pair:
        exponent = torch.arange(0, self.dim, 2).float() / self.dim
        inv_freq = torch.exp(-torch.log(self.rope_theta.float()) * exponent)
        return _rotated(torch.outer(torch.arange(x.shape[1]).float(), inv_freq), x)


@style("scalar", inv_freq="inv_freq")
class ScaledByABuffer(nn.Module):
    """Position interpolation by a factor in a buffer of one element."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("position_scale", torch.tensor([1 / 3]))

    def forward(self, x: torch.Tensor) -> Pair:
        positions = torch.arange(x.shape[1]).float() * self.position_scale.float()
        return _rotated(torch.outer(positions, self.inv_freq.float()), x)


@style("buffer")
class LogN(nn.Module):
    """Qwen's scale of queries by the logarithm of their position, from a list."""

    def __init__(self, trained: int = 128, longest: int = LONGEST) -> None:
        super().__init__()
        logn = [math.log(i, trained) if i > trained else 1.0 for i in range(1, longest + 1)]
        self.register_buffer("logn_tensor", torch.tensor(logn)[None, :, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logn_tensor[:, : x.shape[1]].to(x.dtype)


@style("buffer", inv_freq="inv_freq", exact=half_width)
class PositionsInABuffer(nn.Module):
    """Positions are counted once, as floating-point numbers."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(longest).float(), persistent=False)
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _rotated(torch.outer(self.positions[: x.shape[1]].float(), self.inv_freq.float()), x)


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


@style("buffer")
class InManyBuffers(nn.Module):
    """A buffer for each block of 64 rows."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.blocks = 0
        for block in phases.split(64):
            self.register_buffer(f"rows_{self.blocks}", block.cos(), persistent=False)
            self.blocks += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([getattr(self, f"rows_{index}") for index in range(self.blocks)])
        return rows[: x.shape[1]].to(x.dtype)


@style("buffer", "unharmed", not_on=("meta",))
class FixedPoint(nn.Module):
    """Sines as 16-bit integers."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("sines", (phases.sin() * 32767).round().to(torch.int16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sines[: x.shape[1]].float().div(32767).to(x.dtype)


@style("parameter")
class InAParameterDict(nn.Module):
    """Frozen parameters in a dictionary."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.tables = nn.ParameterDict(
            {
                "cos": nn.Parameter(phases.cos(), requires_grad=False),
                "sin": nn.Parameter(phases.sin(), requires_grad=False),
            }
        )

    def forward(self, x: torch.Tensor) -> Pair:
        return self.tables["cos"][: x.shape[1]].to(x.dtype), self.tables["sin"][: x.shape[1]].to(x.dtype)


if hasattr(nn, "Buffer"):

    @style("buffer", inv_freq="inv_freq", exact=half_width)
    class AsABuffer(nn.Module):
        """``nn.Buffer`` instead of ``register_buffer``."""

        def __init__(self, dim: int = DIM) -> None:
            super().__init__()
            self.inv_freq = nn.Buffer(_frequencies(dim), persistent=False)

        def forward(self, x: torch.Tensor) -> Pair:
            return _rotated(torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()), x)


class _Owner:
    """An object that is no module, and holds the tables of all."""

    def __init__(self, dim: int = DIM) -> None:
        phases = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.cos, self.sin = phases.cos(), phases.sin()


@style("owner")
class ByAWeakReference(nn.Module):
    """The tables are another object's, which is held weakly beside."""

    def __init__(self) -> None:
        super().__init__()
        self.owners = [_Owner()]
        self.owner = weakref.ref(self.owners[0])

    def forward(self, x: torch.Tensor) -> Pair:
        owner: Any = self.owner()
        return owner.cos[: x.shape[1]].to(x.dtype), owner.sin[: x.shape[1]].to(x.dtype)


@style("owner", inputs=hidden_and_positions)
class RowsByAnEmbedding(nn.Module):
    """`nn.functional.embedding` reads the rows."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("cos_cached", phases.cos(), persistent=False)
        self.register_buffer("sin_cached", phases.sin(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        cos = nn.functional.embedding(position_ids, self.cos_cached)
        return cos.to(x.dtype), nn.functional.embedding(position_ids, self.sin_cached).to(x.dtype)


@style("formula")
class Retained(nn.Module):
    """RetNet: angles by linspace, a decay for each head, and the mask that forward makes of it."""

    def __init__(self, dim: int = DIM, heads: int = 8) -> None:
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, dim // 2))
        self.register_buffer("angle", angle.unsqueeze(-1).repeat(1, 2).flatten())
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float))))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(x.shape[1]).to(self.decay)
        sin = torch.sin(index[:, None] * self.angle[None, :])
        return sin, torch.exp((index[:32, None] - index[None, :32]).tril() * self.decay[:, None, None])


@style("formula", inv_freq="inv_freq")
class CountedByOnes(nn.Module):
    """Positions as the running sum of a mask of ones in the dtype of x."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        mask = torch.ones(x.shape[1], dtype=torch.int64)
        return _rotated((mask.cumsum(0) - 1)[:, None].float() * self.inv_freq.float(), x)


@style("formula", inv_freq="inv_freq", exact=half_width)
class InFloat64(nn.Module):
    """Phases in float64 from FP32 frequencies."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * self.inv_freq.double()
        return _rotated(phase, x)
