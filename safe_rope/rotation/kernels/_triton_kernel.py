"""The Triton kernel itself. Imported only where triton is installed."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    out_ptr,
    x_ptr,
    heads,
    out_token0,
    out_token1,
    out_head,
    out_element,
    x_token0,
    x_token1,
    x_head,
    x_element,
    other_out_ptr,
    other_x_ptr,
    other_heads,
    other_out_token0,
    other_out_token1,
    other_out_head,
    other_out_element,
    other_x_token0,
    other_x_token1,
    other_x_head,
    other_x_element,
    cos_ptr,
    sin_ptr,
    table_token0,
    table_token1,
    inner_tokens,
    half,
    rest,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    X_IN_HALVES: tl.constexpr,
    OUT_IN_HALVES: tl.constexpr,
    TABLE: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ROUND_BF16: tl.constexpr,
) -> Any:
    """Rotate HEADS heads of one token, of the first tensor or the other. Strides are in elements.

    TABLE says where the columns of both elements of a pair are: 0: in one; 1: half a row apart; 2: side by
    side. Of a head 2 * half elements are rotated, and ``rest`` more are copied (none where REST is 0).
    """
    token = tl.program_id(0).to(tl.int64)
    token0, token1 = token // inner_tokens, token % inner_tokens
    pair = tl.arange(0, HALF)
    inside = pair < half

    cos_at = cos_ptr + token0 * table_token0 + token1 * table_token1
    sin_at = sin_ptr + token0 * table_token0 + token1 * table_token1
    column = pair * 2 if TABLE == 2 else pair
    cos_first = tl.load(cos_at + column, mask=inside, other=0.0)[None, :]
    sin_first = tl.load(sin_at + column, mask=inside, other=0.0)[None, :]
    cos_second, sin_second = cos_first, sin_first
    if TABLE != 0:
        column += half if TABLE == 1 else 1
        cos_second = tl.load(cos_at + column, mask=inside, other=0.0)[None, :]
        sin_second = tl.load(sin_at + column, mask=inside, other=0.0)[None, :]
    if CONJUGATE:
        sin_first, sin_second = -sin_first, -sin_second
        if TABLE != 0:
            sin_first, sin_second = sin_second, sin_first

    blocks = tl.cdiv(heads, HEADS)
    block = tl.program_id(1)
    if block < blocks:
        _turn(
            out_ptr + token0 * out_token0 + token1 * out_token1,
            x_ptr + token0 * x_token0 + token1 * x_token1,
            block,
            heads,
            out_head,
            out_element,
            x_head,
            x_element,
            cos_first,
            cos_second,
            sin_first,
            sin_second,
            half,
            rest,
            HEADS,
            HALF,
            REST,
            X_IN_HALVES,
            OUT_IN_HALVES,
            ROUND_BF16,
        )
    else:
        _turn(
            other_out_ptr + token0 * other_out_token0 + token1 * other_out_token1,
            other_x_ptr + token0 * other_x_token0 + token1 * other_x_token1,
            block - blocks,
            other_heads,
            other_out_head,
            other_out_element,
            other_x_head,
            other_x_element,
            cos_first,
            cos_second,
            sin_first,
            sin_second,
            half,
            rest,
            HEADS,
            HALF,
            REST,
            X_IN_HALVES,
            OUT_IN_HALVES,
            ROUND_BF16,
        )


@triton.jit
def _turn(
    out_ptr,
    x_ptr,
    block,
    heads,
    out_head,
    out_element,
    x_head,
    x_element,
    cos_first,
    cos_second,
    sin_first,
    sin_second,
    half,
    rest,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    X_IN_HALVES: tl.constexpr,
    OUT_IN_HALVES: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):
    head = block.to(tl.int64) * HEADS + tl.arange(0, HEADS)
    is_head = (head < heads)[:, None]
    out_at = out_ptr + (head * out_head)[:, None]
    x_at = x_ptr + (head * x_head)[:, None]
    pair = tl.arange(0, HALF)
    mask = is_head & (pair < half)[None, :]

    x_first = (pair if X_IN_HALVES else 2 * pair).to(tl.int64)
    x_second = x_first + (half if X_IN_HALVES else 1)
    first = tl.load(x_at + (x_first * x_element)[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + (x_second * x_element)[None, :], mask=mask, other=0.0).to(tl.float32)

    # Launched with enable_fp_fusion=False: no product and sum below becomes one operation.
    turned_first = first * cos_first - second * sin_first
    turned_second = second * cos_second + first * sin_second

    out_first = (pair if OUT_IN_HALVES else 2 * pair).to(tl.int64)
    out_second = out_first + (half if OUT_IN_HALVES else 1)
    out_first, out_second = (out_first * out_element)[None, :], (out_second * out_element)[None, :]
    if ROUND_BF16:
        tl.store(out_at + out_first, _to_bf16(turned_first), mask=mask)
        tl.store(out_at + out_second, _to_bf16(turned_second), mask=mask)
    else:
        tl.store(out_at + out_first, turned_first.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_at + out_second, turned_second.to(out_ptr.dtype.element_ty), mask=mask)

    if REST > 0:
        kept = tl.arange(0, REST)
        is_kept = is_head & (kept < rest)[None, :]
        column = (2 * half + kept).to(tl.int64)
        values = tl.load(x_at + (column * x_element)[None, :], mask=is_kept)
        tl.store(out_at + (column * out_element)[None, :], values, mask=is_kept)


@triton.jit
def _to_bf16(value):
    """Round FP32 to BF16, ties to even. Triton's interpreter truncates where a device rounds."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(value == value, rounded, 0x7FC0)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
