"""The inverse frequencies of each RoPE variant, on CPU.

A checkpoint was trained with what transformers computes: FP32 at every step. There, every function
performs the sequence of FP32 operations that transformers performs, because the frequencies belong to the
checkpoint: a better-rounded value would be another model. In float64 the same formulas give the frequencies
that the config means. Python numbers stay Python numbers until they meet a tensor, so the default dtype never
takes part.

Each formula takes how to compute and a `RopeSpec`, whose `_checks` guarantee what its rope type needs. D is
the rotary dimension; results have the arithmetic's dtype, ``[D // 2]``, the fastest frequency first.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from safe_rope._base.originals import vector
from safe_rope.frequencies import _powers

YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0

_VECTOR_CHUNK = 32
"""PyTorch's vector code for AVX-512 takes 32 FP32 elements at a time and leaves the rest to scalar code."""

Number = float | torch.Tensor


@dataclass(frozen=True)
class Arithmetic:
    """How precisely to compute, and how to raise a number to a power.

    Attributes:
        dtype: of every tensor.
        wavelengths: ``theta ** (2i / D)`` for i < count, from (theta, count, D).
        power: one number raised to a float exponent.
    """

    dtype: torch.dtype
    wavelengths: Callable[[Number, int, int], torch.Tensor]
    power: Callable[[Number, float], Number]


def _exponents(count: int, dim: int) -> torch.Tensor:
    """Return 2i / dim for i < count, FP32 ``[count]``."""
    return vector(range(0, 2 * count, 2), torch.float32) / dim


def _machine_wavelengths(theta: Number, count: int, dim: int) -> torch.Tensor:
    powers: torch.Tensor = theta ** _exponents(count, dim)
    return powers


def _checkpoint_wavelengths(theta: Number, count: int, dim: int) -> torch.Tensor:
    if isinstance(theta, torch.Tensor):
        return _emulated_wavelengths(theta, count, dim)
    return _usual_wavelengths(float(theta), count, dim).clone()


@functools.lru_cache(maxsize=64)
def _usual_wavelengths(theta: float, count: int, dim: int) -> torch.Tensor:
    # Cached: emulating pow takes about 24 tensor operations, and models repeat a few settings.
    with torch.inference_mode(False), torch.no_grad():
        return _emulated_wavelengths(theta, count, dim)


def _emulated_wavelengths(theta: Number, count: int, dim: int) -> torch.Tensor:
    exponents = _exponents(count, dim)
    base = vector([float(theta)], torch.float32).reshape(())
    chunks = count // _VECTOR_CHUNK * _VECTOR_CHUNK
    rest = exponents[chunks:].tolist()
    powers = _powers.vector_power(base, exponents[:chunks])
    if not rest:
        return powers
    return torch.cat((powers, _powers.nearest_powers(base.item(), rest, torch.float32)))


def _checkpoint_power(base: Number, exponent: float) -> Number:
    if not isinstance(base, torch.Tensor):
        return _powers.nearest_power(base, exponent, 53)
    # PyTorch raises a single FP32 number to a Python number in double precision and rounds the result.
    return _powers.nearest_powers(base.item(), [exponent], torch.float32).reshape(())


def _exact_wavelengths(theta: Number, count: int, dim: int) -> torch.Tensor:
    exponents = [Fraction(2 * i, dim) for i in range(count)]
    return _powers.nearest_powers(float(theta), exponents, torch.float64)


def _exact_power(base: Number, exponent: float) -> Number:
    return _powers.nearest_power(float(base), exponent, 53)


ARITHMETICS = {
    "checkpoint": Arithmetic(torch.float32, _checkpoint_wavelengths, _checkpoint_power),
    "exact": Arithmetic(torch.float64, _exact_wavelengths, _exact_power),
    "machine": Arithmetic(torch.float32, _machine_wavelengths, operator.pow),
}


def _geometric(arithmetic: Arithmetic, theta: Number, dim: int) -> torch.Tensor:
    """Return theta**(-2i / D). Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2."""
    frequencies: torch.Tensor = 1.0 / arithmetic.wavelengths(theta, dim // 2, dim)
    return frequencies


def _default(arithmetic: Arithmetic, spec: Any, length: float, as_tensor: bool) -> torch.Tensor:
    return _geometric(arithmetic, spec.rope_theta, spec.rotary_dim)


def _linear(arithmetic: Arithmetic, spec: Any, length: float, as_tensor: bool) -> torch.Tensor:
    """Return the base frequencies over ``factor``. Source: position interpolation, arXiv:2306.15595."""
    frequencies: torch.Tensor = _geometric(arithmetic, spec.rope_theta, spec.rotary_dim) / spec.factor
    return frequencies


def _dynamic(arithmetic: Arithmetic, spec: Any, length: float, as_tensor: bool) -> torch.Tensor:
    """Return the NTK-aware frequencies: the base grows with a sequence longer than the trained length.

    ``as_tensor`` raises it in the arithmetic's dtype, as transformers does when the length comes from
    ``position_ids``; otherwise it is raised in double precision, as for a Python integer.

    Source: the dynamic form of NTK-aware scaling, arXiv:2309.00071, section 3.3 and appendix B.1.
    """
    dim, trained_length = spec.rotary_dim, spec.max_position_embeddings
    if length <= trained_length:
        if as_tensor:
            return _geometric(arithmetic, spec.rope_theta, dim)
        length = trained_length  # whose stretch is 1, but for the rounding of a factor that is not whole
    current: Number = vector([length], arithmetic.dtype).reshape(()) if as_tensor else length
    stretch = spec.factor * current / trained_length - (spec.factor - 1)
    return _geometric(arithmetic, spec.rope_theta * arithmetic.power(stretch, dim / (dim - 2)), dim)


def _yarn(arithmetic: Arithmetic, spec: Any, length: float, as_tensor: bool) -> torch.Tensor:
    """Return the NTK-by-parts frequencies: slow ones interpolated, fast ones kept, a ramp between.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2.
    """
    theta, dim = spec.rope_theta, spec.rotary_dim

    def pair(rotations: float) -> float:
        """Return the (fractional) pair whose phase turns ``rotations`` times over the trained length."""
        trained_length = spec.original_max_position_embeddings
        return float((dim * math.log(trained_length / (rotations * 2 * math.pi))) / (2 * math.log(theta)))

    low, high = pair(spec.beta_fast or YARN_BETA_FAST), pair(spec.beta_slow or YARN_BETA_SLOW)
    if spec.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = torch.clamp((vector(range(dim // 2), arithmetic.dtype) - low) / (high - low), 0, 1)

    wavelengths = arithmetic.wavelengths(theta, dim // 2, dim)
    kept = 1.0 / wavelengths
    interpolated = 1.0 / (spec.factor * wavelengths)
    # 1 - (1 - ramp) is not ramp in FP32, and the stock code rounds twice.
    keep = 1 - ramp
    blended: torch.Tensor = interpolated * (1 - keep) + kept * keep
    return blended


def _longrope(arithmetic: Arithmetic, spec: Any, length: float, as_tensor: bool) -> torch.Tensor:
    """Return the base frequencies, each over its own searched factor.

    Source: Ding et al. 2024, arXiv:2402.13753, eq. 3.
    """
    is_long = length > spec.original_max_position_embeddings
    factors = vector(spec.long_factor if is_long else spec.short_factor, arithmetic.dtype)
    wavelengths = arithmetic.wavelengths(spec.rope_theta, spec.rotary_dim // 2, spec.rotary_dim)
    frequencies: torch.Tensor = 1.0 / (factors * wavelengths)
    return frequencies


def _llama3(arithmetic: Arithmetic, spec: Any, length: float, as_tensor: bool) -> torch.Tensor:
    """Return the base frequencies with the slow ones divided by ``factor`` and a blend in between.

    A phase that turns fewer than ``low_freq_factor`` times over the trained length is slow, one that turns
    more than ``high_freq_factor`` times is fast.

    Source: Llama 3.1's reference implementation, meta-llama/llama-models, ``apply_scaling``.
    """
    trained_length, low, high = (
        spec.original_max_position_embeddings,
        spec.low_freq_factor,
        spec.high_freq_factor,
    )
    base = _geometric(arithmetic, spec.rope_theta, spec.rotary_dim)
    wavelength = 2 * math.pi / base
    slow, fast = wavelength > trained_length / low, wavelength < trained_length / high
    scaled = torch.where(slow, base / spec.factor, base)
    blend = (trained_length / wavelength - low) / (high - low)
    blended = (1 - blend) * scaled / spec.factor + blend * scaled
    return torch.where(~slow & ~fast, blended, scaled)


def _proportional(arithmetic: Arithmetic, spec: Any, length: float, as_tensor: bool) -> torch.Tensor:
    """Return head-wide frequencies; the part beyond the first ``partial_rotary_factor`` is zero.

    Unlike partial rotary embeddings, the exponents are relative to the whole head.

    Source: the text layers of Gemma 4, as transformers' rope type ``proportional`` computes them.
    """
    dim = spec.rotary_dim
    turning = int(spec.partial_rotary_factor * dim // 2)
    still = dim // 2 - turning
    parts = [1.0 / arithmetic.wavelengths(spec.rope_theta, turning, dim)] if turning else []
    parts += [vector([0.0] * still, arithmetic.dtype)] if still else []
    return torch.cat(parts) / (1.0 if spec.factor is None else spec.factor)


FORMULAS: dict[str, Callable[[Arithmetic, Any, float, bool], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""Takes the arithmetic, a `RopeSpec`, the current sequence length, and whether that came as a tensor."""


# ---- what cos and sin are multiplied by ------------------------------------------------------------------


def _yarn_scaling(spec: Any) -> float:
    """Return the temperature of attention, 0.1 ln(factor) + 1. Source: arXiv:2309.00071, eq. 22."""

    def temperature(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return temperature(spec.mscale) / temperature(spec.mscale_all_dim)
    return temperature(1.0)


def _longrope_scaling(spec: Any) -> float:
    """Return sqrt(1 + ln(factor) / ln(trained length)). Source: arXiv:2402.13753, section 3.3."""
    if spec.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position_embeddings))


SCALINGS: dict[str, Callable[[Any], float]] = {"yarn": _yarn_scaling, "longrope": _longrope_scaling}
