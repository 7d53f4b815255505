"""What a value becomes once its dtype is lowered, in numbers."""

from __future__ import annotations

import struct
from functools import cache

_POSITION = 4095
# The first whole number that a dtype cannot hold is one more than this.
LIMITS = {"bfloat16": 256, "float16": 2048, "float8": 16}
_HARMLESS = 256  # what counts whole numbers up to here is no finding


def in_bfloat16(value: float) -> float:
    """Round to nearest even, as a cast from FP32 does."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return rounded


def position(dtype: str = "bfloat16", last: float | None = None) -> str:
    """Say what becomes of a count that is held in a low dtype."""
    name = dtype if dtype in LIMITS else "bfloat16"
    limit = LIMITS[name]
    if last is not None and last <= min(limit, _HARMLESS):
        return f"fractions keep {limit.bit_length() - 1} bits in {name}"
    if name == "bfloat16" and last is not None and limit < last < 1e9 and in_bfloat16(last) != last:
        return f"{last:,.10g} rounds to {in_bfloat16(last):,.0f} in bfloat16"
    return f"{limit + 1:,} rounds to {limit:,} in {name}"


@cache
def exponent(base: float | None = None, dimension: int | None = None) -> str:
    """Say what becomes of inverse frequencies when their exponents, and all that follows, are in bfloat16.

    Args:
        base: what is raised to the exponents, if the code says so.
        dimension: the exponents are 0, 2, … below it, divided by it, if the code says so.
    """
    if base is None or dimension is None or not (1 < base < 1e12 and 2 <= dimension <= 4096):
        return "inverse frequencies made of it keep 8 bits in bfloat16"
    relative = phase = 0.0
    for index in range(0, dimension, 2):
        exact = base ** (-index / dimension)
        low = in_bfloat16(1 / in_bfloat16(base ** in_bfloat16(in_bfloat16(index) / dimension)))
        relative = max(relative, abs(low / exact - 1))
        phase = max(phase, abs(low - exact) * _POSITION)
    return f"inv_freq off by {100 * relative:.1f} %, {phase:.0f} rad at position {_POSITION:,}, in bfloat16"
