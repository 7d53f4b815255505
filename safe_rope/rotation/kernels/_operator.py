"""One differentiable rotation in front of the three implementations.

Eagerly it is a `torch.autograd.Function`. Whatever records instead of computing (a compiler, export, fake
tensors) sees one operator, ``safe_rope::rotary``, whose arithmetic it can neither fuse nor contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from safe_rope._base.positions import must_stay_opaque
from safe_rope._base.torch_private import is_exporting_to_onnx, operator
from safe_rope.rotation.kernels import _compiled, _eager, _triton
from safe_rope.rotation.kernels._form import Form, joined, parse, planes, table_planes


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
        return tuple(torch.ops.safe_rope.rotary(x, cos, sin, form.key, False) for x in xs)
    return _apply(cos, sin, form, False, *xs)


def _of_operators(x: Tensor, cos: Tensor, sin: Tensor, form: Form) -> Tensor:
    """Rotate with operators that every runtime has."""
    width = form.rotary_dim(cos.shape[-1])
    cos, sin = table_planes(cos, form.table, width), table_planes(sin, form.table, width)
    turned = _eager.turned(planes(x, form.pairs, width).float(), cos, sin, conjugate=False)
    return torch.cat((joined(*turned, form.out).to(x.dtype), x[..., width:]), -1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, form: Form) -> Tensor:
    """Rotate ``x`` in place and return it; see `rotate`. Needs ``form.out == form.pairs``.

    Raises:
        RuntimeError: autograd does not allow it (a leaf that requires grad).
    """
    return _apply_in_place(cos, sin, form, x)


def compute(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: Form,
    conjugate: bool,
    compiled: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate ``x``, one of `rotate`'s xs, with the implementation that fits it. No autograd.

    ``conjugate``: by the negative angle, from ``form.out`` back to ``form.pairs``. ``compiled``: a compiler
    is in use anyway, so that a compiled kernel may be made for a large x on CPU. ``out``: where to write; a
    new tensor if None.
    """
    pairs, out_pairs = (form.out, form.pairs) if conjugate else (form.pairs, form.out)
    rotary_dim = form.rotary_dim(cos.shape[-1])
    if out is None:
        out = torch.empty_like(x)
        if rotary_dim != x.shape[-1]:
            out[..., rotary_dim:] = x[..., rotary_dim:]
    arguments = (
        planes(out, out_pairs, rotary_dim),
        planes(x, pairs, rotary_dim),
        table_planes(cos, form.table, rotary_dim),
        table_planes(sin, form.table, rotary_dim),
        conjugate,
    )
    if x.is_cuda and _triton.available():
        _triton.rotate_planes(*arguments)
    elif compiled and out is not x and _compiled.worthwhile(x):
        _compiled.rotate_planes(*arguments)
    else:
        _eager.rotate_planes(*arguments)
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(cos: Tensor, sin: Tensor, form: Form, conjugate: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(compute(x, cos, sin, form, conjugate) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        cos, sin, ctx.form, ctx.conjugate = inputs[:4]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (None,) * 4 + _each(cos, sin, ctx.form, not ctx.conjugate, gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _each(cos, sin, ctx.form, ctx.conjugate, tangents[4:])

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
        results = _apply(cos, sin, form, conjugate, *moved)
        return results, (0,) * len(results)


def _each(
    cos: Tensor, sin: Tensor, form: Form, conjugate: bool, xs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    there = [x for x in xs if x is not None]
    if not there:
        return xs
    rotated = iter(_apply(cos, sin, form, conjugate, *there))
    return tuple(None if x is None else next(rotated) for x in xs)


def _batch_first(x: Tensor, dim: int | None) -> Tensor:
    return x.unsqueeze(0) if dim is None else x.movedim(dim, 0)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, form: Form, x: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        return compute(x, cos, sin, form, False, out=x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, None, None, *_each(cos, sin, ctx.form, True, (gradient,))


# What torch leaves without types.
_apply: Callable[..., tuple[Tensor, ...]] = _Rotation.apply
_apply_in_place: Callable[..., Tensor] = _InPlace.apply


@operator("safe_rope::rotary", "(Tensor x, Tensor cos, Tensor sin, str form, bool conjugate) -> Tensor")
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, form: str, conjugate: bool) -> Tensor:
    return compute(x, cos, sin, parse(form), conjugate, compiled=True)


@_rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, form: str, conjugate: bool) -> Tensor:
    return torch.empty_like(x)


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, ctx.form, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return torch.ops.safe_rope.rotary(gradient, cos, sin, ctx.form, not ctx.conjugate), None, None, None, None


_rotary.register_autograd(_turn_back, setup_context=_keep_tables)
