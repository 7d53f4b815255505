"""One differentiable rotation in front of the three implementations.

Eagerly it is a `torch.autograd.Function`. Whatever records instead of computing (a compiler, export, fake
tensors) sees one operator, ``safe_rope::rotary``, whose arithmetic it can neither fuse nor contract. Inductor
alone gets loops of it, and only where it contracts nothing (`_fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from safe_rope._base.inductor import lower
from safe_rope._base.positions import must_stay_opaque
from safe_rope._base.torch_private import (
    is_exporting_to_onnx,
    is_forward_mode,
    is_transformed,
    operator,
)
from safe_rope._base.triton import available
from safe_rope.rotation.kernels import _compiled, _eager, _triton
from safe_rope.rotation.kernels._form import Form, joined, parse, planes, space_for, table_planes, unrotated
from safe_rope.rotation.kernels._fused import loops


def rotate(xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, form: Form) -> tuple[Tensor, ...]:
    """Rotate each of ``xs`` and round once. Differentiable in xs, any number of times; works under vmap.

    Args:
        xs: each [..., head_dim], bfloat16, float16 or float32; elements beyond rotary_dim pass through.
        cos: FP32, the rank of xs, each leading dimension that of xs or 1; no gradient.
        sin: as cos.
        form: how elements and columns make pairs.

    Returns:
        New tensors with the shapes and dtypes of ``xs``, laid out in memory as they are.
    """
    if must_stay_opaque(xs[0]):
        if is_exporting_to_onnx():
            return tuple(_of_operators(x, cos, sin, form) for x in xs)
        return tuple(torch.ops.safe_rope.rotary(xs, cos, sin, form.key, False))
    return _rotated(xs, cos, sin, form, conjugate=False)


def _of_operators(x: Tensor, cos: Tensor, sin: Tensor, form: Form) -> Tensor:
    """Rotate with operators that every runtime has."""
    width = form.rotary_dim(cos.shape[-1])
    cos, sin = table_planes(cos, form.table, width), table_planes(sin, form.table, width)
    first, second = planes(x, form.pairs, width).float().unbind(0)
    turned = joined(first * cos[0] - second * sin[0], second * cos[1] + first * sin[1], form.out)
    return torch.cat((turned.to(x.dtype), x[..., width:]), -1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, form: Form) -> Tensor:
    """Rotate ``x`` in place and return it; see `rotate`. Needs ``form.out == form.pairs``.

    Raises:
        RuntimeError: autograd does not allow it (a leaf that requires grad).
    """
    return _apply_in_place(cos, sin, form, x)


def compute(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    form: Form,
    conjugate: bool,
    compiled: bool = False,
    outs: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Rotate each of `rotate`'s ``xs`` with the implementation that fits it. No autograd.

    ``conjugate``: by the negative angle, from ``form.out`` back to ``form.pairs``. ``compiled``: a compiler
    is in use anyway, so that a compiled kernel may be made for a large x on CPU. ``outs``: where to write;
    new tensors if None.
    """
    before, after = (form.out, form.pairs) if conjugate else (form.pairs, form.out)
    width = form.rotary_dim(cos.shape[-1])
    if xs[0].is_cuda and available():
        results = tuple([space_for(x, width) for x in xs] if outs is None else outs)
        _triton.rotate(results, xs, cos, sin, before, after, form.table, conjugate)
        return results
    if not (compiled and outs is None and _compiled.worthwhile(xs[0])):
        columns = _eager.columns(cos, sin, form, conjugate)
        given = outs or (None,) * len(xs)
        pairs = zip(xs, given, strict=True)
        return tuple([_eager.rotated(x, *columns, before, after, out) for x, out in pairs])
    cos, sin = table_planes(cos, form.table, width), table_planes(sin, form.table, width)
    results = tuple([unrotated(x, width) for x in xs])
    for x, out in zip(xs, results, strict=True):
        _compiled.rotate_planes(planes(out, after, width), planes(x, before, width), cos, sin, conjugate)
    return results


def _rotated(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, form: Form, conjugate: bool
) -> tuple[Tensor, ...]:
    """Rotate by what autograd sees, where it has to see anything: that costs as much as a kernel."""
    learns = torch.is_grad_enabled() and any([x.requires_grad for x in xs])
    if learns or is_transformed() or is_forward_mode():
        return _differentiably(xs, cos, sin, form, conjugate)
    return compute(xs, cos, sin, form, conjugate)


def _differentiably(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, form: Form, conjugate: bool
) -> tuple[Tensor, ...]:
    # What torch.func transforms is called in another way, in which torch looks at its signature each time.
    function = _Transformed if is_transformed() else _Rotation
    results: tuple[Tensor, ...] = function.apply(cos, sin, form, conjugate, *xs)  # type: ignore[no-untyped-call]
    return results


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        cos, sin, form, conjugate, *xs = inputs
        _keep_for_each(ctx, inputs, None)
        return compute(xs, cos, sin, form, conjugate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (None,) * 4 + _each(cos, sin, ctx.form, not ctx.conjugate, gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _each(cos, sin, ctx.form, ctx.conjugate, tangents[4:])


def _keep_for_each(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    cos, sin, ctx.form, ctx.conjugate = inputs[:4]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin)
    ctx.save_for_forward(cos, sin)


class _Transformed(_Rotation):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        cos, sin, form, conjugate, *xs = inputs
        return compute(xs, cos, sin, form, conjugate)

    setup_context = staticmethod(_keep_for_each)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        cos: Tensor,
        sin: Tensor,
        form: Form,
        conjugate: bool,
        *xs: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # All have the same rank, so that one more dimension in front of each keeps them aligned.
        cos, sin = _batch_first(cos, in_dims[0]), _batch_first(sin, in_dims[1])
        moved = [_batch_first(x, dim) for x, dim in zip(xs, in_dims[4:], strict=True)]
        sizes = [info.batch_size if cos.shape[0] > 1 or sin.shape[0] > 1 else x.shape[0] for x in moved]
        moved = [x.expand(size, *x.shape[1:]) for x, size in zip(moved, sizes, strict=True)]
        results = _differentiably(moved, cos, sin, form, conjugate)
        return results, (0,) * len(results)


def _each(
    cos: Tensor, sin: Tensor, form: Form, conjugate: bool, xs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    there = [x for x in xs if x is not None]
    if not there:
        return xs
    rotated = iter(_rotated(there, cos, sin, form, conjugate))
    return tuple(None if x is None else next(rotated) for x in xs)


def _batch_first(x: Tensor, dim: int | None) -> Tensor:
    return x.unsqueeze(0) if dim is None else x.movedim(dim, 0)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, form: Form, x: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        return compute((x,), cos, sin, form, False, outs=(x,))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, None, None, *_each(cos, sin, ctx.form, True, (gradient,))


# What torch leaves without types.
_apply_in_place: Callable[..., Tensor] = _InPlace.apply


@operator("safe_rope::rotary", "(Tensor[] xs, Tensor cos, Tensor sin, str form, bool conjugate) -> Tensor[]")
def _rotary(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, form: str, conjugate: bool) -> list[Tensor]:
    return list(compute(xs, cos, sin, parse(form), conjugate, compiled=True))


@_rotary.register_fake
def _(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, form: str, conjugate: bool) -> list[Tensor]:
    width = parse(form).rotary_dim(cos.shape[-1])
    return [space_for(x, width) for x in xs]


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, ctx.form, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    back = torch.ops.safe_rope.rotary(gradients, cos, sin, ctx.form, not ctx.conjugate)
    return back, None, None, None, None


_rotary.register_autograd(_turn_back, setup_context=_keep_tables)
lower(_rotary, loops)
