"""Complex products in double-double arithmetic, made of float64 additions and multiplications only.

A double-double is an unevaluated sum of two float64 numbers, about 106 significant bits. No operation here
may be fused: each torch call rounds once, which is what makes the error terms exact and the bits portable.

Source: Dekker 1971, "A floating-point technique for extending the available precision";
Knuth, TAOCP 2, 4.2.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SPLITTER = 134217729.0  # 2**27 + 1: halves a 53-bit significand


class Real(NamedTuple):
    """The number ``high + low``, with ``high`` nearest to it; float64 tensors of one shape."""

    high: Tensor
    low: Tensor


Phasor = Tensor
"""cos + i sin: float64 ``[4, ...]``, the two words of cos, then those of sin."""


class _Factor(NamedTuple):
    """A Real with its high word split in two, so that products of the halves are exact."""

    value: Real
    upper: Tensor
    lower: Tensor


def _factor(x: Real) -> _Factor:
    scaled = x.high * _SPLITTER
    upper = scaled - (scaled - x.high)
    return _Factor(x, upper, x.high - upper)


def _multiply(a: _Factor, b: _Factor) -> Real:
    product = a.value.high * b.value.high
    error = a.upper * b.upper - product
    error += a.upper * b.lower
    error += a.lower * b.upper
    error += a.lower * b.lower
    error += a.value.high * b.value.low
    error += a.value.low * b.value.high
    return Real(product, error)


def _renormalise(high: Tensor, low: Tensor) -> Real:
    total = high + low
    return Real(total, low - (total - high))


def _add(a: Real, b: Real) -> Real:
    total = a.high + b.high
    b_part = total - a.high
    error = (a.high - (total - b_part)) + (b.high - b_part)
    error += a.low
    error += b.low
    return _renormalise(total, error)


def _negate(a: Real) -> Real:
    return Real(-a.high, -a.low)


def _factors(a: Phasor) -> tuple[_Factor, _Factor]:
    return _factor(Real(a[0], a[1])), _factor(Real(a[2], a[3]))


def rotate(a: Phasor, b: Phasor) -> Phasor:
    """Return the phasor of the sum of two angles; the words of the operands broadcast."""
    (a_cos, a_sin), (b_cos, b_sin) = _factors(a), _factors(b)
    cos = _add(_multiply(a_cos, b_cos), _negate(_multiply(a_sin, b_sin)))
    sin = _add(_multiply(a_sin, b_cos), _multiply(a_cos, b_sin))
    return torch.stack((*cos, *sin))


def scale(a: Phasor, factor: Tensor) -> Phasor:
    """Return the phasor times a real number, float64 and 0-dimensional."""
    real = _factor(Real(factor, factor - factor))
    cos, sin = (_renormalise(*_multiply(part, real)) for part in _factors(a))
    return torch.stack((*cos, *sin))
