"""cos and sin of ``2**k * inv_freq`` to far more digits than float64 has, from integer arithmetic alone.

Everything here is fixed-point arithmetic on Python integers, so the result is the same on every machine. The
libm and SLEEF functions behind ``torch.cos`` differ from one instruction set to the next. An FP32
inv_freq is a dyadic rational, hence exact in fixed point.
"""

from __future__ import annotations

import math

FRACTION_BITS = 288
"""Fraction bits of every number here: squaring 62 times costs 62 of them, a double-double needs 110."""

_HALVINGS = 8
_GUARD_BITS = 160
"""An FP32 number is below 2**128, so reducing it modulo 2 pi loses at most that many bits of pi."""

_TWO_PI = int(
    "6487ED5110B4611A62633145C06E0E68948127044533E63A0105DF53"
    "1D89CD9128A5043CC71A026EF7CA8CD9E69D218D98158536F92F8A1BA",
    base=16,
)
"""2 pi with FRACTION_BITS + _GUARD_BITS fraction bits."""

DoubleDouble = tuple[float, float]


def _reduce(angle: float) -> int:
    """Return ``angle`` modulo 2 pi, in ``[0, 2 pi)``, with FRACTION_BITS fraction bits."""
    bits = FRACTION_BITS + _GUARD_BITS
    numerator, denominator = angle.as_integer_ratio()
    return (((numerator << bits) // denominator) % _TWO_PI) >> _GUARD_BITS


def _square(c: int, s: int) -> tuple[int, int]:
    return (c * c - s * s) >> FRACTION_BITS, (c * s) >> (FRACTION_BITS - 1)


def _cos_sin(angle: int) -> tuple[int, int]:
    """Return cos and sin of a fixed-point angle: Taylor series of ``angle / 2**8``, then eight doublings."""
    x = angle >> _HALVINGS
    minus_x2 = -((x * x) >> FRACTION_BITS)
    c = c_term = 1 << FRACTION_BITS
    s = s_term = x
    n = 0
    while c_term and s_term and c_term != -1 and s_term != -1:
        c_term = ((c_term * minus_x2) >> FRACTION_BITS) // ((n + 1) * (n + 2))
        s_term = ((s_term * minus_x2) >> FRACTION_BITS) // ((n + 2) * (n + 3))
        c += c_term
        s += s_term
        n += 2
    for _ in range(_HALVINGS):
        c, s = _square(c, s)
    return c, s


def _to_double_double(value: int) -> DoubleDouble:
    """Round a fixed-point number to a float64, and what that left to another one."""
    high = float(value)
    low = float(value - int(high))
    return math.ldexp(high, -FRACTION_BITS), math.ldexp(low, -FRACTION_BITS)


def doubled_angles(inv_freq: float, count: int) -> list[tuple[DoubleDouble, DoubleDouble]]:
    """Return (cos, sin) of ``2**k * inv_freq`` for ``k = 0 .. count - 1``.

    Args:
        inv_freq: a finite FP32 number, radians per position.
        count: how many doublings, at most 63.

    Returns:
        ``count`` pairs of double-doubles, each within 2**-106 of its size or 2**-200, whichever is larger.
    """
    c, s = _cos_sin(_reduce(inv_freq))
    pairs = []
    for _ in range(count):
        pairs.append((_to_double_double(c), _to_double_double(s)))
        c, s = _square(c, s)
    return pairs
