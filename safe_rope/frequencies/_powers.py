"""Powers of rope_theta whose bits do not depend on the machine.

``torch.pow`` in FP32 on CPU is the C library's ``powf`` in scalar code and SLEEF's in vector code. The two
differ by one unit in the last place in a few frequencies of a model. Three ways to raise a base are here:

* ``vector_power``: the bits of the vector code, which is what a model built on any current CPU gets;
* ``nearest_power``: the correctly rounded power, from integer arithmetic alone;
* the machine's own, which is ``torch.pow`` and needs no function.

Source of the vector code's algorithm: SLEEF 3.6, ``Sleef_powf_u10`` in its form with fused multiply-add
(N. Shibata and F. Petrogalli 2020, doi:10.1109/TPDS.2019.2960333), as PyTorch bundles it for AVX2, AVX-512
and NEON.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._base import originals

_FRACTION_BITS = 192
_ONE = 1 << _FRACTION_BITS


# ---- correctly rounded, in fixed point -------------------------------------------------------------------


def _atanh(numerator: int, denominator: int) -> int:
    """Return atanh of a ratio of at most 1/3 in fixed point (Taylor series)."""
    power = total = (numerator * _ONE) // denominator
    square = (power * power) >> _FRACTION_BITS
    divisor = 1
    while power not in (0, -1):
        power = (power * square) >> _FRACTION_BITS
        divisor += 2
        total += power // divisor
    return total


@cache
def _ln2() -> int:
    return 2 * _atanh(1, 3)


@lru_cache(maxsize=64)
def _ln(x: float) -> int:
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.75:
        mantissa, exponent = 2 * mantissa, exponent - 1
    numerator, denominator = mantissa.as_integer_ratio()
    return 2 * _atanh(numerator - denominator, numerator + denominator) + exponent * _ln2()


def _exp(x: int) -> tuple[int, int]:
    """Return ``(m, k)`` with exp(x) = m / 2**_FRACTION_BITS * 2**k and m / 2**_FRACTION_BITS about 1 to 2."""
    k, x = divmod(x, _ln2())
    term = total = _ONE
    n = 0
    while term:
        n += 1
        term = ((term * x) >> _FRACTION_BITS) // n
        total += term
    return total, k


def nearest_power(base: float, exponent: Fraction | float, digits: int) -> float:
    """Return ``base ** exponent`` rounded once to ``digits`` binary digits (24 for FP32, 53 for float64).

    Args:
        base: a positive finite number.
        exponent: finite; a Fraction is taken as it is.
        digits: at most 53. The result must be a normal number.
    """
    numerator, denominator = exponent.as_integer_ratio()
    mantissa, power = _exp(_ln(base) * numerator // denominator)
    # One more than the digits, and a last bit that is 1 where anything was cut: rounds like the full number.
    cut = mantissa.bit_length() - digits - 2
    kept = mantissa >> cut
    if abs(mantissa - (kept << cut)) >> 16 and abs(((kept + 1) << cut) - mantissa) >> 16:
        kept |= 1  # away from an exact power by more than the arithmetic's error
    elif (mantissa - (kept << cut)) >> (cut - 1):
        kept += 1
    rounded = round(Fraction(kept, 4))
    return math.ldexp(rounded, cut + 2 + power - _FRACTION_BITS)


def nearest_powers(base: float, exponents: list[float] | list[Fraction], dtype: torch.dtype) -> Tensor:
    """Return ``base ** exponents``, each rounded once to ``dtype`` (FP32 or float64), CPU ``[n]``."""
    digits = 24 if dtype == torch.float32 else 53
    return originals.vector((nearest_power(base, exponent, digits) for exponent in exponents), dtype)


# ---- the bits of the vector code -------------------------------------------------------------------------


class _Pair(NamedTuple):
    """The number ``high + low``; FP32 tensors."""

    high: Tensor
    low: Tensor


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return FP32 ``a * b + c``; the product is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def _multiply(x: _Pair, y: _Pair) -> _Pair:
    high = x.high * y.high
    low = _fma(x.low, y.high, _fma(x.high, y.high, -high))
    return _Pair(high, _fma(x.high, y.low, low))


def _scale(x: _Pair, y: Tensor) -> _Pair:
    high = x.high * y
    return _Pair(high, _fma(x.low, y, _fma(x.high, y, -high)))


def _square(x: _Pair) -> _Pair:
    high = x.high * x.high
    return _Pair(high, _fma(x.high + x.high, x.low, _fma(x.high, x.high, -high)))


def _add(x: _Pair, y: _Pair) -> _Pair:
    """Return the sum, given that x is the larger."""
    high = x.high + y.high
    return _Pair(high, x.high - high + y.high + x.low + y.low)


def _add_any(x: Tensor, y: Tensor) -> _Pair:
    high = x + y
    y_part = high - x
    return _Pair(high, (x - (high - y_part)) + (y - y_part))


def _divide(x: _Pair, y: _Pair) -> _Pair:
    inverse = 1.0 / y.high
    high = x.high * inverse
    error = _fma(inverse, x.high, -high)
    rest = _fma(-y.low, inverse, _fma(-y.high, inverse, _constant(1.0)))
    return _Pair(high, _fma(high, rest, _fma(x.low, inverse, error)))


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = _constant(coefficients[0])
    for coefficient in coefficients[1:]:
        total = _fma(total, x, _constant(coefficient))
    return total


def _constant(value: float) -> Tensor:
    return originals.tensor(value, dtype=torch.float32, device="cpu")


def _log(x: Tensor) -> _Pair:
    exponent = torch.frexp(x * _constant(1 / 0.75)).exponent - 1
    mantissa = torch.ldexp(x, -exponent)
    ratio = _divide(_add_any(_constant(-1.0), mantissa), _add_any(_constant(1.0), mantissa))
    square = _square(ratio)
    series = _polynomial(
        square.high, (0.240320354700088500976562, 0.285112679004669189453125, 0.400007992982864379882812)
    )
    scaled = _scale(square, series)
    leading = _Pair(_constant(0.66666662693023681640625), _constant(3.69183861259614332084311e-09))
    total = _add_any(scaled.high, leading.high)
    total = _Pair(total.high, total.low + (scaled.low + leading.low))
    ln2 = _Pair(_constant(0.69314718246459960938), _constant(-1.904654323148236017e-09))
    result = _scale(ln2, exponent.float())
    result = _add(result, _Pair(ratio.high * 2, ratio.low * 2))
    return _add(result, _multiply(_multiply(square, ratio), total))


def _exp_of_pair(x: _Pair) -> Tensor:
    quotient = ((x.high + x.low) * _constant(1.4426950408889634)).round()
    high, low = x
    for part in (0.693145751953125, 1.428606765330187045e-06):
        reduced = _add_any(high, quotient * _constant(-part))
        high, low = reduced.high, reduced.low + low
    total = high + low
    rest = _Pair(total, high - total + low)
    series = _polynomial(
        rest.high,
        (
            0.00136324646882712841033936,
            0.00836596917361021041870117,
            0.0416710823774337768554688,
            0.166665524244308471679688,
            0.499999850988388061523438,
        ),
    )
    result = _add(rest, _scale(_square(rest), series))
    one = _constant(1.0)
    total = one + result.high
    return torch.ldexp(total + (one - total + result.high + result.low), quotient.int())


def vector_power(base: Tensor, exponents: Tensor) -> Tensor:
    """Return FP32 ``base ** exponents`` with the bits of PyTorch's vector code on CPU.

    Args:
        base: FP32 CPU, 0-dimensional, positive and finite.
        exponents: FP32 CPU ``[n]``; the powers must be normal numbers.
    """
    power = _exp_of_pair(_scale(_log(base), exponents))
    return torch.where(exponents == 0, _constant(1.0), power)
