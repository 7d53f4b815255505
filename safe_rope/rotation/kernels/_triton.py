"""The rotation as one Triton kernel: each program holds the cos and sin of one token and turns its heads.

Launching costs more than the arithmetic of a few tokens, so that q and k are rotated by one launch, which
also copies what of a head passes through.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._base.triton import interpreted, on_device_of, power_of_two

_HEADS = 32
"""Heads of one token that a program rotates, at most."""
_PAIRS_PER_WARP = 128
"""Pairs of elements that a warp rotates, at most four warps."""
_TABLES = {"shared": 0, "first": 0, "half": 1, "interleaved": 2}


class _Dims(NamedTuple):
    """Which dimensions of x, but for the last, the kernel walks through, and how many tokens there are."""

    outer: int | None
    inner: int | None
    heads: int | None
    tokens: int
    inner_tokens: int
    surplus: int | None
    """A dimension more than the kernel has; it is then launched for each index of that."""


def rotate(
    outs: Sequence[Tensor],
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    before: str,
    after: str,
    table: str,
    conjugate: bool,
) -> None:
    """Write into ``outs`` what `_eager.rotated` gives for ``xs``, to the bit.

    Args:
        outs: of the shapes and dtypes of ``xs``; each may be the x itself where both orders are the same.
        xs: [..., head_dim], bfloat16, float16 or float32; elements beyond rotary_dim pass through.
        cos: FP32, of the rank of xs, each leading dimension that of x or 1; as wide as ``table`` says.
        sin: as cos.
        before: how the elements of ``xs`` make pairs.
        after: how those of ``outs`` do.
        table: how cos and sin are laid out, see `Form`.
        conjugate: rotate by the negative angle.
    """
    if cos.shape != sin.shape:
        cos, sin = torch.broadcast_tensors(cos, sin)  # type: ignore[no-untyped-call]
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    how = before == "half", after == "half", table, conjugate
    pairs = [(out, x) for out, x in zip(outs, xs, strict=True) if x.numel()]
    while pairs:
        (out, x), *pairs = pairs
        dims = _dims(x.shape, cos.shape, sin.shape)
        if dims.surplus is None:
            other = None
            if (
                pairs
                and pairs[0][1].dtype == x.dtype
                and _go_together(x.shape, pairs[0][1].shape, dims, cos.shape)
            ):
                other = pairs.pop(0)
            _launch(out, x, other, cos, sin, dims, how)
            continue
        for index in range(x.shape[dims.surplus]):
            part, of_x, of_cos, of_sin = (_at(dims.surplus, index, one) for one in (out, x, cos, sin))
            rotate((part,), (of_x,), of_cos, of_sin, before, after, table, conjugate)


def _at(dim: int, index: int, tensor: Tensor) -> Tensor:
    return tensor.narrow(dim, min(index, tensor.shape[dim] - 1), 1)


@functools.lru_cache(maxsize=1024)
def _dims(x: torch.Size, cos: torch.Size, sin: torch.Size) -> _Dims:
    """Say of the leading dimensions of x which has the heads, which share a row, and which have tokens."""
    moving = [dim for dim, size in enumerate(x[:-1]) if size > 1]
    alike = [dim for dim in moving if max(cos[dim], sin[dim]) == 1]
    heads = alike[-1] if alike else None
    tokens = [dim for dim in moving if dim != heads]
    surplus = tokens[0] if len(tokens) > 2 else None
    outer, inner = [None] * (2 - len(tokens)) + tokens if surplus is None else (None, None)
    inner_tokens = 1 if inner is None else x[inner]
    return _Dims(outer, inner, heads, math.prod(x[dim] for dim in tokens), inner_tokens, surplus)


@functools.lru_cache(maxsize=1024)
def _go_together(x: torch.Size, other: torch.Size, dims: _Dims, cos: torch.Size) -> bool:
    """Whether one launch can rotate tensors of both shapes: nothing but the number of heads differs."""
    differing = [dim for dim, (one, two) in enumerate(zip(x, other, strict=True)) if one != two]
    return not differing or differing == [dims.heads]


def _launch(
    out: Tensor,
    x: Tensor,
    other: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    dims: _Dims,
    how: tuple[bool, bool, str, bool],
) -> None:
    from safe_rope.rotation.kernels._triton_kernel import rotate_kernel

    x_in_halves, out_in_halves, table, conjugate = how
    half = cos.shape[-1] if table == "shared" else cos.shape[-1] // 2
    rest = 0 if out is x else x.shape[-1] - 2 * half
    heads = 1 if dims.heads is None else x.shape[dims.heads]
    others = 0 if other is None else 1 if dims.heads is None else other[1].shape[dims.heads]
    block, width = min(_HEADS, power_of_two(max(heads, others))), power_of_two(half)
    strides = cos.stride()
    cos_shape = cos.shape
    first = (out, x, heads, *_strides(out, dims), *_strides(x, dims))
    second = (
        first if other is None else (*other, others, *_strides(other[0], dims), *_strides(other[1], dims))
    )
    with on_device_of(x):
        rotate_kernel[(dims.tokens, math.ceil(heads / block) + math.ceil(others / block))](
            *first,
            *second,
            cos,
            sin,
            0 if dims.outer is None or cos_shape[dims.outer] == 1 else strides[dims.outer],
            0 if dims.inner is None or cos_shape[dims.inner] == 1 else strides[dims.inner],
            dims.inner_tokens,
            half,
            rest,
            HEADS=block,
            HALF=width,
            REST=power_of_two(rest) if rest else 0,
            X_IN_HALVES=x_in_halves,
            OUT_IN_HALVES=out_in_halves,
            TABLE=_TABLES[table],
            CONJUGATE=conjugate,
            ROUND_BF16=interpreted() and x.dtype == torch.bfloat16,
            num_warps=min(max(block * width // _PAIRS_PER_WARP, 1), 4),
            enable_fp_fusion=False,
        )


def _strides(tensor: Tensor, dims: _Dims) -> tuple[int, int, int, int]:
    """Strides of the outer and inner tokens, the heads and the elements; 0 where there is none."""
    strides = tensor.stride()
    return (
        0 if dims.outer is None else strides[dims.outer],
        0 if dims.inner is None else strides[dims.inner],
        0 if dims.heads is None else strides[dims.heads],
        strides[-1],
    )
