"""The rotation of a few tokens on CPU, where the number of operations counts and not the memory they move.

What is rotated is laid side by side, raised once, turned with tables that have a column for each element,
and rounded once. Plain differentiable operations: the bits, forward and backward, are the other kernels';
only the layout of a gradient in memory is not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope.rotation.kernels import _eager
from safe_rope.rotation.kernels._form import Form, memory_order

LARGEST = 1 << 15
"""Elements of all that is rotated together below which this is the fastest."""
LARGEST_WITH_GRADIENT = 1 << 17
"""The same where a gradient is needed."""
_LARGEST_CHOSEN = 1 << 12
"""Elements up to which an index swaps halves faster than a roll, which is three operators to torch."""


class Plan(NamedTuple):
    """How several tensors are laid side by side, and taken apart again.

    Args:
        dim: along which they are laid side by side, of the permuted tensors.
        sizes: of each along ``dim``.
        order: the dimensions as they lie in memory; None where that is their own order.
        back: the permutation that undoes ``order``.
        is_outermost: whether what is cut along ``dim`` is contiguous.
        width: how many elements of a head are rotated; None for all.
    """

    dim: int
    sizes: tuple[int, ...]
    order: tuple[int, ...] | None
    back: tuple[int, ...]
    is_outermost: bool
    width: int | None


def plan(
    xs: tuple[Tensor, ...], cos: Tensor, unsqueeze: int, form: Form, needs_gradient: bool
) -> Plan | None:
    """Return how to lay ``xs`` side by side; None where they are not alike, or are rotated faster apart.

    ``cos`` fits them; ``unsqueeze`` is where the dimension of the heads goes into it.
    """
    heads = unsqueeze if unsqueeze >= 0 else cos.dim() + 1 + unsqueeze
    largest = LARGEST_WITH_GRADIENT if needs_gradient else LARGEST
    if not all(x.is_cpu and x.numel() for x in xs) or sum([x.numel() for x in xs]) >= largest:
        return None
    orders = {memory_order(x) for x in xs}
    shapes = {(*x.shape[:heads], *x.shape[heads + 1 :], x.dtype) for x in xs}
    if len(orders) != 1 or len(shapes) != 1:
        return None
    (order,) = orders
    if order[-1] != len(order) - 1:
        return None
    own = tuple(range(len(order)))
    dim, width = order.index(heads), form.rotary_dim(cos.shape[-1])
    return Plan(
        dim,
        tuple(x.shape[heads] for x in xs),
        None if order == own else order,
        tuple(map(order.index, own)),
        all(xs[0].shape[d] == 1 for d in order[:dim]),
        None if width == xs[0].shape[-1] else width,
    )


def arrange(cos: Tensor, sin: Tensor, form: Form, how: Plan) -> tuple[Tensor, Tensor]:
    """Return `columns`, for what is laid side by side, of FP32 tables of the rank of what is rotated."""
    if how.order is not None:
        cos, sin = cos.permute(how.order), sin.permute(how.order)
    return columns(cos, sin, form)


def columns(cos: Tensor, sin: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return what `turn` multiplies by: `_eager.columns`, but each sin where its product is added."""
    cos, sin = _eager.columns(cos, sin, form)
    return cos, _partners(sin, form.out)


def turn(xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, form: Form, how: Plan) -> tuple[Tensor, ...]:
    """Rotate ``xs`` with arranged tables; the results are laid out in memory as `space_for` says."""
    dim, sizes, order, back, is_outermost, width = how
    if order is None and width is None and len(xs) == 1:
        (x,) = xs
        raised = x.clone() if x.dtype == torch.float32 else x.float()
        return (_turned(raised, cos, sin, form).to(x.dtype),)
    if order is not None:
        xs = tuple([x.permute(order) for x in xs])
    together = torch.cat(xs, dim)
    part = together if width is None else together[..., :width]
    raised = _turned(part.float(), cos, sin, form)
    if width is None and not is_outermost:
        together = raised  # each part is rounded for itself, and contiguous by that
    elif raised is not part:
        part.copy_(raised)
    results = _parts(together, sizes, dim)
    if not is_outermost and width is None:
        results = [one.to(xs[0].dtype).contiguous() for one in results]
    if order is not None:
        results = [one.permute(back) for one in results]
    return tuple(results if width is None else [one.contiguous() for one in results])


def _turned(raised: Tensor, cos: Tensor, sin: Tensor, form: Form) -> Tensor:
    """Rotate FP32 ``raised``; where its pairs lie as in ``out``, the result is written to it."""
    if form.pairs != form.out:
        raised = _paired_otherwise(raised, form.out)
    other = _partners(raised, form.out)
    return raised.mul_(cos).add_(other.mul_(sin))


def _partners(x: Tensor, order: str) -> Tensor:
    """Return for each element the other of its pair."""
    chosen = partners_at(x.shape, order) if _may_choose(x) else None
    if chosen is not None:
        return x.gather(-1, chosen)
    return _rolled(x) if order == "half" else _swapped(x)


def partners_at(shape: torch.Size, order: str) -> Tensor | None:
    """Return where each element's partner lies in its row, None where it is faster found without an index."""
    if order == "half":
        return sources(_rolled, shape) if shape.numel() <= _LARGEST_CHOSEN else None
    return sources(_swapped, shape)


def _parts(together: Tensor, sizes: tuple[int, ...], dim: int) -> Sequence[Tensor]:
    if not torch.is_grad_enabled():
        return torch.split_with_sizes(together, sizes, dim)
    # Autograd lets nobody write to one of several views that were made together.
    starts = itertools.accumulate(sizes, initial=0)
    return [together.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def _paired_otherwise(x: Tensor, out: str) -> Tensor:
    """Return a copy of ``x``, whose pairs lie the other way, with pairs that lie as in ``out``."""
    place = _apart if out == "half" else _joined
    return x.gather(-1, sources(place, x.shape)) if _may_choose(x) else place(x)


def _may_choose(x: Tensor) -> bool:
    """Whether elements may be chosen by an index: one operator, but -0.0 has the gradient 0.0 then."""
    return type(x) is Tensor and not (x.requires_grad and torch.is_grad_enabled())


@functools.lru_cache(maxsize=256)
def sources(place: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
    """Return the index in its row of each element that ``place`` gives; it has memory for one row."""
    with torch.inference_mode(False):
        return place(originals.arange(shape[-1], dtype=torch.int64, device="cpu")).expand(shape)


def _rolled(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def _swapped(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 2).flip(-1).view(x.shape)


def _apart(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)


def _joined(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], 2, -1).transpose(-1, -2).reshape(x.shape)
