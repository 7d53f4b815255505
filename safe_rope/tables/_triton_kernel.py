"""The lookup of exact tables as a Triton kernel. Imported only where triton is installed."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def lookup_kernel(
    cos_ptr,
    sin_ptr,
    positions_ptr,
    fine_ptr,
    coarse_ptr,
    top_ptr,
    half,
    HALF: tl.constexpr,
    FINE_BITS: tl.constexpr,
    FINE_ROWS: tl.constexpr,
    COARSE_BITS: tl.constexpr,
    COARSE_ROWS: tl.constexpr,
    TOP_ROWS: tl.constexpr,
    TABLE_POSITIONS: tl.constexpr,
) -> Any:
    """Store cos and sin of one position: what `_exact` combines from the rows of its three digits."""
    at = tl.program_id(0).to(tl.int64)
    signed = tl.load(positions_ptr + at).to(tl.int64)
    magnitude = tl.where(signed < 0, -signed, signed)
    invalid = (magnitude < 0) | (magnitude >= TABLE_POSITIONS)  # the smallest int64 is its own magnitude
    upper = magnitude >> FINE_BITS
    two_digits = upper < COARSE_ROWS
    coarse = tl.where(two_digits, upper, upper & ((1 << COARSE_BITS) - 1))
    top = tl.where(two_digits, 0, upper >> COARSE_BITS)
    coarse, top = tl.where(invalid, 0, coarse), tl.where(invalid, TOP_ROWS, top)
    fine = magnitude & (FINE_ROWS - 1)

    column = tl.arange(0, HALF)
    mask = column < half
    # The planes of cos and of sin follow each other; the top level has a row of NaN after its last.
    a_cos = tl.load(top_ptr + top * half + column, mask=mask, other=0.0)
    a_sin = tl.load(top_ptr + (TOP_ROWS + 1 + top) * half + column, mask=mask, other=0.0)
    b_cos = tl.load(coarse_ptr + coarse * half + column, mask=mask, other=0.0)
    b_sin = tl.load(coarse_ptr + (COARSE_ROWS + coarse) * half + column, mask=mask, other=0.0)
    c_cos = tl.load(fine_ptr + fine * half + column, mask=mask, other=0.0)
    c_sin = tl.load(fine_ptr + (FINE_ROWS + fine) * half + column, mask=mask, other=0.0)

    # Launched with enable_fp_fusion=False: no product and sum below becomes one operation.
    factor_cos = a_cos * b_cos - a_sin * b_sin
    factor_sin = a_sin * b_cos + a_cos * b_sin
    cos = c_cos * factor_cos - c_sin * factor_sin
    sin = c_sin * factor_cos + c_cos * factor_sin
    sin = tl.where(signed < 0, -sin, sin)
    tl.store(cos_ptr + at * half + column, cos.to(tl.float32), mask=mask)
    tl.store(sin_ptr + at * half + column, sin.to(tl.float32), mask=mask)
