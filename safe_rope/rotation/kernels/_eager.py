"""The rotation in plain torch: blocks small enough for the cache, no FP32 copy of all of q or k.

Cos and sin have a column for each element. The product with sin is added to the other element of the pair,
half of the tensor at a time: nothing is rolled, flipped or laid side by side. Every buffer lies in memory as
x does. Conversions from and to x's dtype cost more than the arithmetic, and run over dense memory by that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope.rotation.kernels._form import Form, joined, memory_order, planes, table_planes, unrotated

_CPU_BLOCK = 1 << 18
"""Elements that are worked on at a time: two FP32 buffers of them are two megabytes. Smaller ones fit a
second-level cache better, and lose more by the operations' fixed cost than they gain."""
_DEVICE_BLOCK = 1 << 24


def columns(cos: Tensor, sin: Tensor, form: Form, conjugate: bool = False) -> tuple[Tensor, Tensor]:
    """Return what `rotated` multiplies each element by, ``[..., rotary_dim]``.

    Args:
        cos: FP32, as wide as ``form`` says.
        sin: as cos.
        form: of the rotation; the columns lie as in ``form.out``, those of its conjugate as ``form.pairs``.
        conjugate: for the rotation by the negative angle.

    Returns:
        cos, which may be the tensor that came; and the sin of what each element is added to, with its sign.
    """
    order = form.pairs if conjugate else form.out
    first, second = _halves(sin, form)
    source = joined(first.neg(), second, order) if conjugate else joined(second, first.neg(), order)
    return cos if form.table == order else joined(*_halves(cos, form), order), source


def _halves(table: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return what multiplies the first and the second element of each pair."""
    if form.table == "shared":
        return table, table
    first, second = table_planes(table, form.table, form.rotary_dim(table.shape[-1])).unbind(0)
    return first, second


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, before: str, after: str, out: Tensor | None = None
) -> Tensor:
    """Return ``x`` rotated, laid out in memory as ``x`` is. No autograd.

    Args:
        x: [..., head_dim], bfloat16, float16 or float32; elements beyond rotary_dim pass through.
        cos: FP32 columns, as `columns` returns them, of the rank of x, each leading dimension that of x or 1.
        sin: as cos.
        before: how the elements of ``x`` make pairs.
        after: how those of the result do.
        out: where to write, which may be ``x`` itself if both orders are the same; a new tensor if None.
    """
    width, limit = cos.shape[-1], _CPU_BLOCK if x.is_cpu else _DEVICE_BLOCK
    is_whole = width == x.shape[-1]
    part, turned = x if is_whole else x[..., :width], None
    if x.numel() <= limit:
        raised = torch.empty_like(part, dtype=torch.float32)
        turned = _turned(part, cos, sin, before, after, raised, torch.empty_like(raised))
        if out is None and is_whole:
            return turned.to(x.dtype)
    out = unrotated(x, width) if out is None else out
    target = out if is_whole else out[..., :width]
    if turned is not None:
        target.copy_(turned)
    else:
        _rotate_in_blocks(target, part, cos, sin, before, after, limit)
    return out


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, before: str, after: str, raised: Tensor, turned: Tensor
) -> Tensor:
    """Return ``turned``, which holds ``x`` rotated; both buffers are FP32, dense and like x in memory."""
    if before == after:
        raised.copy_(x)
    else:
        width = x.shape[-1]
        planes(raised, after, width).copy_(planes(x, before, width))
    torch.mul(raised, cos, out=turned)
    raised.mul_(sin)
    first, second = _elements(turned, after)
    of_first, of_second = _elements(raised, after)
    first.add_(of_second)
    second.add_(of_first)
    return turned


def _elements(x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """View the first and the second elements of all pairs."""
    if order == "half":
        first, second = x.chunk(2, -1)
    else:
        first, second = x.view(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)  # no -1: there may be no rows
    return first, second


def _rotate_in_blocks(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, before: str, after: str, limit: int
) -> None:
    steps = _steps(tuple(x.shape), tuple(cos.shape), limit)
    varying = [d for d in range(x.dim() - 1) if max(cos.shape[d], sin.shape[d]) > 1]
    others = [d for d in range(x.dim() - 1) if d not in varying]
    work = originals.empty((2, math.prod(steps)), dtype=torch.float32, device=x.device)
    raised = turned = work
    for out_rows, x_rows, cos_rows, sin_rows in _cut((out, x, cos, sin), varying, steps):
        for out_part, x_part in _cut((out_rows, x_rows), others, steps):
            if raised.shape != x_part.shape:
                raised, turned = (_like(x_part, buffer) for buffer in work.unbind(0))
            out_part.copy_(_turned(x_part, cos_rows, sin_rows, before, after, raised, turned))


def _like(x: Tensor, buffer: Tensor) -> Tensor:
    """View what ``x`` needs of a buffer, in the layout that it has in memory."""
    order = memory_order(x)
    shape, back = [x.shape[d] for d in order], [order.index(d) for d in range(x.dim())]
    return buffer[: x.numel()].view(shape).permute(back)


def _steps(shape: tuple[int, ...], table: tuple[int, ...], limit: int) -> list[int]:
    """Return how much of each dimension of ``shape`` [..., rotary_dim] a block of ``limit`` elements takes.

    Cut first where cos and sin vary, so that a block's tables are small and serve all heads.
    """
    steps = list(shape)
    for dim in sorted(range(len(shape) - 1), key=lambda d: (table[d] == 1, -shape[d])):
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
