"""The rotation in plain torch: blocks small enough for the cache, no FP32 copy of all of q or k.

A block is held in the order in which x lies in memory. The conversions from and to x's dtype cost more than
the arithmetic, and so they run over dense memory whatever the layout is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from safe_rope._base import originals

_CPU_BLOCK = 1 << 18
"""Elements that are worked on at a time: two FP32 buffers of them are two megabytes. Smaller ones fit a
second-level cache better, and lose more by the operations' fixed cost than they gain."""
_SMALL = 1 << 14
"""Elements up to which the number of operations counts, not the memory that they move."""
_DEVICE_BLOCK = 1 << 24


def rotate_planes(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> None:
    """Write the rotation of ``x`` into ``out``, which may be ``x`` itself.

    Args:
        out: where to write, [2, ..., rotary_dim // 2]: the two elements of every pair.
        x: the same shape and dtype: bfloat16, float16 or float32.
        cos: FP32, the same rank, each dimension that of x or 1.
        sin: as cos.
        conjugate: rotate by the negative angle.
    """
    if x.numel() <= _SMALL:
        _rotate_at_once(out, x.float(), cos, sin, conjugate)
        return
    steps = _steps(tuple(x.shape), tuple(cos.shape), _CPU_BLOCK if x.is_cpu else _DEVICE_BLOCK)
    varying = [d for d in range(x.dim()) if max(cos.shape[d], sin.shape[d]) > 1]
    others = [d for d in range(x.dim()) if d not in varying]
    block = _Block(x, math.prod(steps), conjugate)
    for out_rows, x_rows, cos_rows, sin_rows in _cut((out, x, cos, sin), varying, steps):
        block.take_tables(cos_rows, sin_rows)
        for out_part, x_part in _cut((out_rows, x_rows), others, steps):
            block.rotate(out_part, x_part)


def _rotate_at_once(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> None:
    for plane, values in zip(out.unbind(0), turned(x, cos, sin, conjugate), strict=True):
        plane.copy_(values)


def turned(x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> tuple[Tensor, Tensor]:
    """Return the two elements of every pair of ``x``, FP32 [2, ..., half], rotated; see `rotate_planes`."""
    first, second = x.unbind(0)
    cos_first, cos_second = cos.unbind(0)
    sin_first, sin_second = sin.unbind(0)
    if conjugate:
        return first * cos_first + second * sin_second, second * cos_second - first * sin_first
    return first * cos_first - second * sin_first, second * cos_second + first * sin_second


class _Block:
    """Two FP32 buffers of ``size`` elements, in which parts of ``x`` are rotated one after the other."""

    def __init__(self, x: Tensor, size: int, conjugate: bool) -> None:
        self._order = sorted(range(x.dim()), key=x.stride, reverse=True)
        self._planes = self._order.index(0)
        self._work = originals.empty((2, size), dtype=torch.float32, device=x.device)
        self._conjugate = conjugate
        self._shape: torch.Size | None = None

    def take_tables(self, cos: Tensor, sin: Tensor) -> None:
        """Keep the tables of the parts that follow, a column for each element and as dense as these."""
        self._cos, sin = cos.permute(self._order).contiguous(), sin.permute(self._order)
        # Each sin multiplies the element that it is added from, in the other plane when turning forward.
        self._sin = (
            sin.contiguous() if self._conjugate else torch.stack(sin.unbind(self._planes)[::-1], self._planes)
        )

    def rotate(self, out: Tensor, x: Tensor) -> None:
        """Write the rotation of ``x``, which fits the buffers, into ``out``."""
        out, x = out.permute(self._order), x.permute(self._order)
        if x.shape != self._shape:
            self._lay_out(x)
        self._raised.copy_(x)
        torch.mul(self._raised, self._cos, out=self._turned)
        self._raised.mul_(self._sin)
        if self._conjugate:
            self._turned_first.add_(self._raised_second)
            self._turned_second.sub_(self._raised_first)
        else:
            self._turned_first.sub_(self._raised_second)
            self._turned_second.add_(self._raised_first)
        out.copy_(self._turned)

    def _lay_out(self, x: Tensor) -> None:
        self._shape = x.shape
        self._raised, self._turned = (buffer[: x.numel()].view(x.shape) for buffer in self._work)
        self._raised_first, self._raised_second = self._raised.unbind(self._planes)
        self._turned_first, self._turned_second = self._turned.unbind(self._planes)


def _steps(shape: tuple[int, ...], table: tuple[int, ...], limit: int) -> list[int]:
    """Return how much of each dimension of ``shape`` [2, ..., half] a block of ``limit`` elements takes.

    Cut first where cos and sin vary, so that a block's tables are small and serve all heads.
    """
    leading = range(1, len(shape) - 1)
    steps = list(shape)
    for dim in sorted(leading, key=lambda d: (table[d] == 1, -shape[d])):
        others = math.prod(steps) // steps[dim]
        if others * steps[dim] <= limit:
            break
        steps[dim] = max(1, limit // others)
    return steps


def _cut(tensors: tuple[Tensor, ...], dims: list[int], steps: list[int]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the pieces of ``tensors`` along ``dims``; where a tensor's size is 1, it serves for all."""
    whole = tensors[0].shape
    dim = next((d for d in dims if steps[d] < whole[d]), None)
    if dim is None:
        yield tensors
        return
    count = math.ceil(whole[dim] / steps[dim])
    pieces = [torch.split(t, steps[dim], dim) if t.shape[dim] > 1 else (t,) * count for t in tensors]
    for parts in zip(*pieces, strict=True):
        yield from _cut(parts, [d for d in dims if d != dim], steps)
