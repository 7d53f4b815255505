"""Forwards that return what is no tensor, or return nothing and write to their arguments."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from styles.formulas import Pair
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.names import frequencies
from styles.owners import HEAD_DIM, SEEN, Attention, swap_halves
from styles.registry import LONGEST, style


class Rope(nn.Module):
    """Frequencies; cos and sin have their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(HEAD_DIM), persistent=False)

    def tables(self, x: torch.Tensor) -> Pair:
        emb = torch.outer(torch.arange(x.shape[2]).to(self.inv_freq), self.inv_freq).repeat(1, 2)
        return emb.cos(), emb.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + swap_halves(x) * sin


class Yielding(Rope):
    """Is a generator."""

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from self.tables(x)


@style("returned", "generator", shows="output", inv_freq="rope.inv_freq")
class YieldsItsTables(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Yielding()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return rotated(x, *self.rope(x))


class Binding(Rope):
    """Returns what rotates."""

    def forward(self, x: torch.Tensor) -> Any:
        cos, sin = self.tables(x)
        return functools.partial(rotated, cos=cos, sin=sin)


@style("returned", "partial", shows="output", inv_freq="rope.inv_freq")
class ReturnsAPartial(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Binding()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.rope(x)(x)


class Rotation:
    """Cos and sin, and what is done with them."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos, self.sin = cos, sin

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return rotated(x, self.cos, self.sin)


class Wrapping(Rope):
    """Returns an object."""

    def forward(self, x: torch.Tensor) -> Rotation:
        return Rotation(*self.tables(x))


@style("returned", "object", shows="output", inv_freq="rope.inv_freq")
class ReturnsAnObject(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Wrapping()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.rope(x).turn(x)


class InPlace(Rope):
    """Rotates q and k where they are, as the kernels of servers do."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> None:
        emb = torch.outer(torch.arange(q.shape[2]).float(), self.inv_freq.float()).repeat(1, 2)
        for x in (q, k):
            x.copy_(rotated(x.float(), emb.cos(), emb.sin()).to(x.dtype))


@style("returned", "in place", shows="output", inv_freq="rope.inv_freq")
class RotatesInPlace(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = InPlace()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        self.rope(q, k)
        out = functional.scaled_dot_product_attention(q, k[:, :, :SEEN], v[:, :, :SEEN], scale=1.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class WritesOut(Rope):
    """Fills what it is given."""

    def forward(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        emb = torch.outer(torch.arange(x.shape[2]).float(), self.inv_freq.float()).repeat(1, 2)
        out[...] = emb.cos().to(x.dtype)
        return out


@style("returned", "out argument", shows="output", inv_freq="rope.inv_freq")
class WritesToAnOutArgument(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = WritesOut()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[2], HEAD_DIM, dtype=x.dtype)
        self.rope(x, out=out)
        return x * out


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
