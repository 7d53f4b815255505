"""The Triton kernel itself. Imported only where triton is installed."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    out_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    inner_tokens,
    inner_heads,
    heads,
    half,
    out_plane,
    out_token0,
    out_token1,
    out_head0,
    out_head1,
    out_element,
    x_plane,
    x_token0,
    x_token1,
    x_head0,
    x_head1,
    x_element,
    cos_plane,
    cos_token0,
    cos_token1,
    cos_element,
    sin_plane,
    sin_token0,
    sin_token1,
    sin_element,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ROUND_BF16: tl.constexpr,
) -> Any:
    """Rotate HEADS heads of one token. Strides are in elements."""
    token = tl.program_id(0).to(tl.int64)
    token0, token1 = token // inner_tokens, token % inner_tokens
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    head0, head1 = head // inner_heads, head % inner_heads
    element = tl.arange(0, HALF).to(tl.int64)

    cos_at = cos_ptr + token0 * cos_token0 + token1 * cos_token1 + element * cos_element
    sin_at = sin_ptr + token0 * sin_token0 + token1 * sin_token1 + element * sin_element
    inside = element < half
    cos_first = tl.load(cos_at, mask=inside, other=0.0)[None, :]
    cos_second = tl.load(cos_at + cos_plane, mask=inside, other=0.0)[None, :]
    sin_first = tl.load(sin_at, mask=inside, other=0.0)[None, :]
    sin_second = tl.load(sin_at + sin_plane, mask=inside, other=0.0)[None, :]

    mask = (head < heads)[:, None] & inside[None, :]
    x_at = x_ptr + token0 * x_token0 + token1 * x_token1 + (head0 * x_head0 + head1 * x_head1)[:, None]
    x_at += (element * x_element)[None, :]
    first = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + x_plane, mask=mask, other=0.0).to(tl.float32)

    # Launched with enable_fp_fusion=False: no product and sum below becomes one operation.
    if CONJUGATE:
        turned_first = first * cos_first + second * sin_second
        turned_second = second * cos_second - first * sin_first
    else:
        turned_first = first * cos_first - second * sin_first
        turned_second = second * cos_second + first * sin_second

    out_at = out_ptr + token0 * out_token0 + token1 * out_token1
    out_at += (head0 * out_head0 + head1 * out_head1)[:, None] + (element * out_element)[None, :]
    if ROUND_BF16:
        tl.store(out_at, _to_bf16(turned_first), mask=mask)
        tl.store(out_at + out_plane, _to_bf16(turned_second), mask=mask)
    else:
        tl.store(out_at, turned_first.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_at + out_plane, turned_second.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _to_bf16(value):
    """Round FP32 to BF16, ties to even. Triton's interpreter truncates where a device rounds."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(value == value, rounded, 0x7FC0)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
