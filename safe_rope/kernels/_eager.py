"""The rotation in plain torch: blocks small enough for the cache, no FP32 copy of all of q or k."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from safe_rope import _originals

_CPU_BLOCK = 1 << 17
"""Elements that are worked on at a time: two FP32 buffers of them are a megabyte."""
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
    limit = _CPU_BLOCK if x.is_cpu else _DEVICE_BLOCK
    size = min(max(limit, 2 * x.shape[-1]), x.numel())
    work = _originals.empty((2, size), dtype=torch.float32, device=x.device)
    for index in _blocks(tuple(x.shape), tuple(cos.shape), limit):
        part = x[index]
        size = part.numel()
        _rotate_block(
            out[index],
            part,
            cos[_broadcast(index, cos)],
            sin[_broadcast(index, sin)],
            work[0, :size].view(part.shape),
            work[1, :size].view(part.shape),
            conjugate,
        )


def _rotate_at_once(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> None:
    first, second = x.unbind(0)
    cos_first, cos_second = cos.unbind(0)
    sin_first, sin_second = sin.unbind(0)
    if conjugate:
        turned = first * cos_first + second * sin_second, second * cos_second - first * sin_first
    else:
        turned = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    for plane, values in zip(out.unbind(0), turned, strict=True):
        plane.copy_(values)


def _rotate_block(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, raised: Tensor, turned: Tensor, conjugate: bool
) -> None:
    raised.copy_(x)
    torch.mul(raised, cos, out=turned)
    first, second = raised[0], raised[1]
    if conjugate:
        second *= sin[1]
        first *= sin[0]
        turned[0].add_(second)
        turned[1].sub_(first)
    else:
        second *= sin[0]
        first *= sin[1]
        turned[0].sub_(second)
        turned[1].add_(first)
    out.copy_(turned)


def _blocks(shape: tuple[int, ...], table: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices that cut ``shape`` [2, ..., half] into blocks of at most ``limit`` elements.

    Cut first where cos and sin vary, so that a block's tables are small and serve all heads.
    """
    leading = range(1, len(shape) - 1)
    order = sorted(leading, key=lambda d: (table[d] == 1, -shape[d]))
    steps = list(shape)
    for dim in order:
        others = math.prod(steps) // max(steps[dim], 1)
        if others * steps[dim] <= limit:
            break
        steps[dim] = max(1, limit // max(others, 1))
    if 0 in shape:
        return
    index = [slice(None)] * len(shape)
    yield from _cut(index, 1, shape, steps)


def _cut(
    index: list[slice], dim: int, shape: tuple[int, ...], steps: list[int]
) -> Iterator[tuple[slice, ...]]:
    if dim == len(shape) - 1:
        yield tuple(index)
        return
    for start in range(0, shape[dim], steps[dim]):
        index[dim] = slice(start, min(start + steps[dim], shape[dim]))
        yield from _cut(index, dim + 1, shape, steps)


def _broadcast(index: tuple[slice, ...], table: Tensor) -> tuple[slice, ...]:
    return tuple(slice(None) if n == 1 else part for part, n in zip(index, table.shape, strict=True))
