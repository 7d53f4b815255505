"""The rotation as one Triton kernel: each program holds the cos and sin of one token and turns its heads."""

from __future__ import annotations

import functools
import importlib
import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

_HEADS = 32
"""Heads of one token that a program rotates, at most."""


class _Dims(NamedTuple):
    """Two leading dimensions that the kernel walks through: their sizes and where they are."""

    sizes: tuple[int, int]
    dims: tuple[int | None, int | None]

    @property
    def product(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def strides(self, tensor: Tensor, *, table: bool = False) -> tuple[int, int]:
        """Strides in elements; 0 where there is no such dimension or a table has one row for all of it."""
        first, second = (
            0 if dim is None or (table and tensor.shape[dim] == 1) else tensor.stride(dim)
            for dim in self.dims
        )
        return first, second


@functools.cache
def available() -> bool:
    """Whether Triton is installed and can be imported."""
    try:
        importlib.import_module("triton.language")
    except Exception:  # noqa: BLE001 - a broken installation fails in any way
        return False
    return True


def rotate_planes(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> None:
    """Do what `_compiled.rotate_planes` does, to the same bits; ``out`` may be ``x``."""
    if x.numel() == 0:
        return
    leading = range(1, x.dim() - 1)
    tokens = [d for d in leading if x.shape[d] > 1 and max(cos.shape[d], sin.shape[d]) > 1]
    heads = [d for d in leading if x.shape[d] > 1 and d not in tokens]
    surplus = tokens[0] if len(tokens) > 2 else heads[0] if len(heads) > 2 else None
    if surplus is None:
        _launch(out, x, cos, sin, conjugate, _dims(x, tokens), _dims(x, heads))
        return
    # More dimensions than the kernel has: one launch for each index of the first.
    for index in range(x.shape[surplus]):
        one, two, three, four = (
            t.narrow(surplus, min(index, t.shape[surplus] - 1), 1) for t in (out, x, cos, sin)
        )
        rotate_planes(one, two, three, four, conjugate)


def _dims(x: Tensor, dims: list[int]) -> _Dims:
    padded = [None] * (2 - len(dims)) + dims
    first, second = (1 if dim is None else x.shape[dim] for dim in padded)
    return _Dims((first, second), (padded[0], padded[1]))


def _launch(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool, tokens: _Dims, heads: _Dims
) -> None:
    from safe_rope.rotation.kernels._triton_kernel import rotate_kernel

    block = min(_HEADS, _power_of_two(heads.product))
    half = x.shape[-1]
    strides = [
        stride
        for tensor in (out, x)
        for stride in (tensor.stride(0), *tokens.strides(tensor), *heads.strides(tensor), tensor.stride(-1))
    ]
    strides += [
        stride
        for table in (cos, sin)
        for stride in (table.stride(0), *tokens.strides(table, table=True), table.stride(-1))
    ]
    with torch.cuda.device(x.get_device()):  # -1 for the tensors on CPU that Triton's interpreter takes
        rotate_kernel[(tokens.product, math.ceil(heads.product / block))](
            out.detach(),
            x.detach(),
            cos,
            sin,
            tokens.sizes[1],
            heads.sizes[1],
            heads.product,
            half,
            *strides,
            HEADS=block,
            HALF=_power_of_two(half),
            CONJUGATE=conjugate,
            ROUND_BF16=interpreted() and x.dtype == torch.bfloat16,
            num_warps=4,
            enable_fp_fusion=False,
        )


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
