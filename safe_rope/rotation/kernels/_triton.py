"""The rotation as one Triton kernel: each program holds the cos and sin of one token and turns its heads.

Launching costs more than the arithmetic of a few tokens, so that q and k are rotated by one launch, which
also copies what of a head passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from safe_rope._base.triton import interpreted, on_device_of, power_of_two

_HEADS = 32
"""Heads of one token that a program rotates, at most."""
_PAIRS_PER_WARP = 128
"""Pairs of elements that a warp rotates, at most four warps."""
_TABLES = {"shared": 0, "first": 0, "half": 1, "interleaved": 2}
_KEPT = 1024
"""Kinds of calls whose launches are remembered."""


class _Dims(NamedTuple):
    """Which dimensions of x, but for the last, the kernel walks through, and how many tokens there are."""

    outer: int | None
    inner: int | None
    heads: int | None
    tokens: int
    inner_tokens: int
    surplus: int | None
    """A dimension more than the kernel has; it is then launched for each index of that."""


class _Launch(NamedTuple):
    """A launch for tensors of certain shapes and strides.

    Args:
        at: which of the tensors it rotates.
        other: which other one, too; ``at`` where there is none.
        surplus: the dimension for each index of which `rotate` is called instead, if any.
        launch: the kernel with its grid.
        first: what the kernel takes after the pointers of the first tensor.
        second: the same for the other one.
        last: what it takes after those of cos and sin.
        constants: what it is compiled for.
    """

    at: int
    other: int
    surplus: int | None
    launch: Callable[..., Any]
    first: tuple[int, ...] = ()
    second: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    constants: Mapping[str, Any] = MappingProxyType({})


_launches: dict[Any, list[_Launch]] = {}


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
    strides = cos.stride()
    if strides != sin.stride() or strides[-1] != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = cos.stride()
    kinds = [(x.shape, x.stride(), x.dtype, out.stride(), out is x) for out, x in zip(outs, xs, strict=True)]
    key = before, after, table, conjugate, cos.shape, strides, *kinds
    launches = _launches.get(key)
    if launches is None:
        if len(_launches) >= _KEPT:
            _launches.clear()
        launches = _launches[key] = _planned(outs, xs, cos, before, after, table, conjugate)
    for at, other, surplus, launch, first, second, last, constants in launches:
        x = xs[at]
        if surplus is not None:
            for index in range(x.shape[surplus]):
                part, of_x, of_cos, of_sin = (_at(surplus, index, one) for one in (outs[at], x, cos, sin))
                rotate((part,), (of_x,), of_cos, of_sin, before, after, table, conjugate)
            continue
        with on_device_of(x):
            launch(outs[at], x, *first, outs[other], xs[other], *second, cos, sin, *last, **constants)


def _planned(
    outs: Sequence[Tensor],
    xs: Sequence[Tensor],
    cos: Tensor,
    before: str,
    after: str,
    table: str,
    conjugate: bool,
) -> list[_Launch]:
    """Return the launches of a call, which its shapes, strides and dtypes decide."""
    launches = []
    waiting = [at for at, x in enumerate(xs) if x.numel()]
    while waiting:
        at, *waiting = waiting
        x = xs[at]
        dims = _dims(x.shape, cos.shape)
        if dims.surplus is not None:
            launches.append(_Launch(at, at, dims.surplus, rotate))
            continue
        other = None
        if waiting and xs[waiting[0]].dtype == x.dtype and _go_together(x.shape, xs[waiting[0]].shape, dims):
            other = waiting.pop(0)
        how = before == "half", after == "half", table, conjugate
        launches.append(_launch(outs, xs, at, other, cos, dims, how))
    return launches


def _at(dim: int, index: int, tensor: Tensor) -> Tensor:
    return tensor.narrow(dim, min(index, tensor.shape[dim] - 1), 1)


def _dims(x: torch.Size, cos: torch.Size) -> _Dims:
    """Say of the leading dimensions of x which has the heads, which share a row, and which have tokens."""
    moving = [dim for dim, size in enumerate(x[:-1]) if size > 1]
    alike = [dim for dim in moving if cos[dim] == 1]
    heads = alike[-1] if alike else None
    tokens = [dim for dim in moving if dim != heads]
    surplus = tokens[0] if len(tokens) > 2 else None
    outer, inner = [None] * (2 - len(tokens)) + tokens if surplus is None else (None, None)
    inner_tokens = 1 if inner is None else x[inner]
    return _Dims(outer, inner, heads, math.prod(x[dim] for dim in tokens), inner_tokens, surplus)


def _go_together(x: torch.Size, other: torch.Size, dims: _Dims) -> bool:
    """Whether one launch can rotate tensors of both shapes: nothing but the number of heads differs."""
    differing = [dim for dim, (one, two) in enumerate(zip(x, other, strict=True)) if one != two]
    return not differing or differing == [dims.heads]


def _launch(
    outs: Sequence[Tensor],
    xs: Sequence[Tensor],
    at: int,
    other: int | None,
    cos: Tensor,
    dims: _Dims,
    how: tuple[bool, bool, str, bool],
) -> _Launch:
    from safe_rope.rotation.kernels._triton_kernel import rotate_kernel

    x, (x_in_halves, out_in_halves, table, conjugate) = xs[at], how
    half = cos.shape[-1] if table == "shared" else cos.shape[-1] // 2
    rest = 0 if outs[at] is x else x.shape[-1] - 2 * half
    heads = _heads(x, dims)
    others = 0 if other is None else _heads(xs[other], dims)
    block, width = min(_HEADS, power_of_two(max(heads, others))), power_of_two(half)
    steps = [0 if dim is None or cos.shape[dim] == 1 else cos.stride(dim) for dim in (dims.outer, dims.inner)]
    first, second = (
        (_heads(xs[one], dims), *_strides(outs[one], dims), *_strides(xs[one], dims))
        for one in (at, at if other is None else other)
    )
    constants = {
        "HEADS": block,
        "HALF": width,
        "REST": power_of_two(rest) if rest else 0,
        "X_IN_HALVES": x_in_halves,
        "OUT_IN_HALVES": out_in_halves,
        "TABLE": _TABLES[table],
        "CONJUGATE": conjugate,
        "ROUND_BF16": interpreted() and x.dtype == torch.bfloat16,
        "num_warps": min(max(block * width // _PAIRS_PER_WARP, 1), 4),
        "enable_fp_fusion": False,
    }
    grid = dims.tokens, math.ceil(heads / block) + math.ceil(others / block)
    last = *steps, dims.inner_tokens, half, rest
    return _Launch(
        at, at if other is None else other, None, rotate_kernel[grid], first, second, last, constants
    )


def _heads(x: Tensor, dims: _Dims) -> int:
    return 1 if dims.heads is None else x.shape[dims.heads]


def _strides(tensor: Tensor, dims: _Dims) -> tuple[int, int, int, int]:
    """Strides of the outer and inner tokens, the heads and the elements; 0 where there is none."""
    strides = tensor.stride()
    return (
        0 if dims.outer is None else strides[dims.outer],
        0 if dims.inner is None else strides[dims.inner],
        0 if dims.heads is None else strides[dims.heads],
        strides[-1],
    )
