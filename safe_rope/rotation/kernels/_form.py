"""Which elements make a pair, and which columns of the tables belong to it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS = ("half", "interleaved")


@dataclass(frozen=True)
class Form:
    """How the elements of a head are paired, on the way in and out, and how cos and sin are laid out.

    Args:
        pairs: ``"half"`` pairs element i with i + rotary_dim / 2, ``"interleaved"`` 2i with 2i + 1.
        out: the same for the result; some models permute while they rotate (DeepSeek-V3).
        table: how wide cos and sin are. ``"shared"``: rotary_dim / 2 columns, one for each pair. The
            others have rotary_dim columns: ``"half"`` and ``"interleaved"`` have one for each element, in
            that order; of ``"first"`` only the first half of the columns is read (GLM).
    """

    pairs: str = "half"
    out: str = "half"
    table: str = "shared"

    @property
    def key(self) -> str:
        """The form as a string, which an operator can take; `parse` reads it."""
        return f"{self.pairs}.{self.out}.{self.table}"

    def rotary_dim(self, width: int) -> int:
        """How many elements of a head are rotated with tables of ``width`` columns."""
        return 2 * width if self.table == "shared" else width


@functools.cache
def parse(key: str) -> Form:
    """Return the `Form` of a key."""
    return Form(*key.split("."))


def planes(x: Tensor, order: str, rotary_dim: int) -> Tensor:
    """View the first ``rotary_dim`` elements of ``x`` [..., head_dim] as [2, ..., rotary_dim // 2]."""
    half = rotary_dim // 2
    if x.shape[-1] != rotary_dim:
        x = x[..., :rotary_dim]
    if order == "half":
        return x.view(*x.shape[:-1], 2, half).movedim(-2, 0)
    return x.view(*x.shape[:-1], half, 2).movedim(-1, 0)


def space_for(x: Tensor, width: int) -> Tensor:
    """Return memory for ``x`` [..., head_dim] of which ``width`` elements are rotated.

    It is laid out as ``x`` is, or contiguous where something passes through: stock functions put a head
    together with `torch.cat`.
    """
    if width == x.shape[-1]:
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def unrotated(x: Tensor, width: int) -> Tensor:
    """Return `space_for` ``x``, with its elements from ``width`` on."""
    out = space_for(x, width)
    if width != x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of ``x`` from the outermost in memory to the innermost."""
    moving = [d for d in range(x.dim()) if x.shape[d] > 1]
    order = list(range(x.dim()))
    for place, dim in zip(moving, sorted(moving, key=x.stride, reverse=True), strict=True):
        order[place] = dim
    return tuple(order)


def joined(first: Tensor, second: Tensor, order: str) -> Tensor:
    """Return the elements of all pairs, each half [..., rotary_dim // 2], in one last dimension."""
    both = first, second
    return torch.cat(both, -1) if order == "half" else torch.stack(both, -1).flatten(-2)


def table_planes(table: Tensor, order: str, rotary_dim: int) -> Tensor:
    """View cos or sin [..., width] as [2, ..., rotary_dim // 2]: what multiplies each element of a pair."""
    if order in PAIRS:
        return planes(table, order, rotary_dim)
    half = table[..., : rotary_dim // 2]
    return half.expand(2, *half.shape)
