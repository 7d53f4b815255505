"""Models whose attention or parent holds the tables itself; what it computes from them is all that is seen.

Every attention looks at the first eight positions only, so that a wrong phase anywhere moves its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from styles.formulas import Pair, twice
from styles.formulas import waves as _waves
from styles.registry import DIM, LONGEST, style

HEADS = 2
HEAD_DIM = DIM // HEADS
SEEN = 8


def frequencies(dim: int = HEAD_DIM, base: float = 10000.0) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))


def swap_halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    """Projections and scores; the subclass turns q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(DIM, DIM, bias=False) for _ in range(4)
        )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Turn q or k [batch, heads, length, head_dim]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.turn(q, v), self.turn(k, v)
        out = functional.scaled_dot_product_attention(q, k[:, :, :SEEN], v[:, :, :SEEN], scale=1.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


@style("owner", "attention", "buffer", shows="output", inv_freq="inv_freq")
class AttentionWithFrequencies(Attention):
    """All is in the dtype that inv_freq has by now."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(0, HEAD_DIM, 2, dtype=torch.float)
        self.register_buffer("inv_freq", 10000 ** (-steps / HEAD_DIM), persistent=False)

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[2], device=x.device, dtype=self.inv_freq.dtype)
        emb = torch.outer(t, self.inv_freq).repeat(1, 2)
        return x * emb.cos() + swap_halves(x) * emb.sin()


@style("owner", "attention", "buffer", shows="output", inv_freq="inv_freq")
class AttentionThatCasts(Attention):
    """FP32 phases, and cos and sin in the dtype of what they turn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies())

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        emb = torch.outer(torch.arange(x.shape[2]).float(), self.inv_freq.float()).repeat(1, 2)
        return x * emb.cos().to(x.dtype) + swap_halves(x) * emb.sin().to(x.dtype)


@style("owner", "attention", "buffer", shows="output")
class AttentionWithTables(Attention):
    """Finished tables, every dtype said, taken as they are."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 10000 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
        emb = torch.outer(torch.arange(LONGEST, dtype=torch.float32), inv_freq).repeat(1, 2)
        self.register_buffer("cos", emb.cos(), persistent=False)
        self.register_buffer("sin", emb.sin(), persistent=False)

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        n = x.shape[2]
        return x * self.cos[:n] + swap_halves(x) * self.sin[:n]


class Tables(nn.Module):
    """Cos and sin as they are kept; somebody else reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        emb = torch.outer(torch.arange(LONGEST).float(), self.inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", emb.cos(), persistent=False)
        self.register_buffer("sin_cached", emb.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos_cached[: x.shape[1]], self.sin_cached[: x.shape[1]]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[2]
        return x * self.cos_cached[:n] + swap_halves(x) * self.sin_cached[:n]


@style("owner", "read by the parent", shows="output", inv_freq="tables.inv_freq")
class ReadByTheParent(Attention):
    """The child's forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        n = x.shape[2]
        return x * self.tables.cos_cached[:n] + swap_halves(x) * self.tables.sin_cached[:n]


@style("owner", "read by another method", shows="output", inv_freq="tables.inv_freq")
class ReadByAnotherMethod(Attention):
    """The child turns by a method of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.tables.rotate(x)


@style("owner", "called by the parent", shows="output", inv_freq="tables.inv_freq")
class CosSinTaken(Attention):
    """The child's forward gives cos and sin, which are used in the dtype that they come in."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        cos, sin = self.tables(x.transpose(1, 2))
        return x * cos + swap_halves(x) * sin


@style("owner", "frequencies read by the parent", inv_freq="rope.inv_freq", exact=twice)
class FrequenciesReadByTheParent(nn.Module):
    """The parent multiplies the child's buffer by positions of the buffer's dtype."""

    class Rope(nn.Module):
        """Holds the frequencies, and has no forward."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", frequencies(DIM), persistent=False)

    def __init__(self) -> None:
        super().__init__()
        self.rope = self.Rope()

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = self.rope.inv_freq
        emb = torch.outer(torch.arange(x.shape[1]).to(inv_freq.dtype), inv_freq).repeat(1, 2)
        return emb.cos(), emb.sin()


class Turning(nn.Module):
    """Gives cos and sin in the dtype of x."""

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(base=base), persistent=False)

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        emb = torch.outer(torch.arange(length).float(), self.inv_freq.float()).repeat(1, 2)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class AttentionGivenARope(Attention):
    """Holds a rope that others hold too."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rope(x, x.shape[2])
        return x * cos + swap_halves(x) * sin


@style("owner", "shared", shows="output", inv_freq="layers.1.rope.inv_freq")
class SharedRope(nn.Module):
    """One rope in two layers and in the model."""

    def __init__(self) -> None:
        super().__init__()
        rope = Turning(base=5000.0)
        self.layers = nn.ModuleList(AttentionGivenARope(rope) for _ in range(2))
        self.rope = rope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@style("owner", "shared", "replaced", shows="output", inv_freq="layers.1.rope.inv_freq")
class RopeOfTheFirstLayer(nn.Module):
    """Each layer makes its own; then all are given the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AttentionGivenARope(Turning(base=10.0 ** (4 + i))) for i in range(2))
        for layer in self.layers:
            layer.rope = self.layers[0].rope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@style("owner", "container of layers", shows="output", inv_freq="0.rope.inv_freq")
def sequential_of_layers() -> nn.Module:
    return nn.Sequential(*(AttentionGivenARope(Turning()) for _ in range(2)))


@style("owner", "returned with states", inv_freq="rope.inv_freq")
class ReturnsMoreThanTables(nn.Module):
    """A rope that returns the hidden states with its tables."""

    class Rope(nn.Module):
        """Returns a dictionary."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", frequencies(DIM), persistent=False)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
            return {"hidden": x * 2, "cos": phase.cos().to(x.dtype), "sin": phase.sin().to(x.dtype), "n": 3}

    def __init__(self) -> None:
        super().__init__()
        self.rope = self.Rope()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return self.rope(x)


def _frequencies(base: float = 10000.0) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, DIM, 2).float() / DIM)


@style("by steps", "unharmed", shows="output", roundings=4)
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
