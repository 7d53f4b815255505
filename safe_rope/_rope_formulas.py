"""The inverse frequencies of each RoPE variant, in FP32 on CPU.

Every function performs the sequence of FP32 operations that transformers performs, because the frequencies
belong to the checkpoint: a better-rounded value would be another model. Python numbers stay Python numbers
until they meet an FP32 tensor, so the default dtype never takes part.

D is the rotary dimension; results are FP32 ``[D // 2]``, the fastest frequency first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from safe_rope._originals import float32_vector

YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0


def _exponents(count: int, dim: int) -> torch.Tensor:
    """Return 2i / dim for i < count, FP32 ``[count]``."""
    return float32_vector(range(0, 2 * count, 2)) / dim


def geometric(theta: float | torch.Tensor, dim: int) -> torch.Tensor:
    """Return theta**(-2i / D). Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2."""
    frequencies: torch.Tensor = 1.0 / (theta ** _exponents(dim // 2, dim))
    return frequencies


def linear(theta: float, dim: int, factor: float) -> torch.Tensor:
    """Return the base frequencies over ``factor``. Source: position interpolation, arXiv:2306.15595."""
    return geometric(theta, dim) / factor


def dynamic(
    theta: float, dim: int, factor: float, trained_length: int, length: int, as_tensor: bool
) -> torch.Tensor:
    """Return the NTK-aware frequencies of a sequence longer than the model was trained on.

    Args:
        theta: the base that the model was trained with.
        dim: D.
        factor: how far the base grows with the length.
        trained_length: max_position_embeddings.
        length: the current sequence length, greater than ``trained_length``.
        as_tensor: raise the base in FP32, as transformers does when the length comes from ``position_ids``;
            otherwise in double precision, as it does for a Python integer.
    Source: the dynamic form of NTK-aware scaling, arXiv:2309.00071, section 3.3 and appendix B.1.

    """
    current: float | torch.Tensor = float32_vector([length]).reshape(()) if as_tensor else length
    stretch = factor * current / trained_length - (factor - 1)
    return geometric(theta * stretch ** (dim / (dim - 2)), dim)


def _yarn_dim(rotations: float, theta: float, dim: int, trained_length: int) -> float:
    """Return the (fractional) pair index whose phase turns ``rotations`` times over the trained length."""
    return (dim * math.log(trained_length / (rotations * 2 * math.pi))) / (2 * math.log(theta))


def yarn(
    theta: float,
    dim: int,
    factor: float,
    trained_length: int,
    beta_fast: float | None,
    beta_slow: float | None,
    truncate: bool,
) -> torch.Tensor:
    """Return the NTK-by-parts frequencies: slow ones interpolated, fast ones kept, a ramp between.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2.
    """
    low = _yarn_dim(beta_fast or YARN_BETA_FAST, theta, dim, trained_length)
    high = _yarn_dim(beta_slow or YARN_BETA_SLOW, theta, dim, trained_length)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = torch.clamp((float32_vector(range(dim // 2)) - low) / (high - low), 0, 1)

    wavelengths: torch.Tensor = theta ** _exponents(dim // 2, dim)
    kept = 1.0 / wavelengths
    interpolated = 1.0 / (factor * wavelengths)
    # 1 - (1 - ramp) is not ramp in FP32, and the stock code rounds twice.
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def yarn_attention_scaling(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the temperature of attention, 0.1 ln(factor) + 1. Source: arXiv:2309.00071, eq. 22."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def longrope(theta: float, dim: int, rescale_factors: Sequence[float]) -> torch.Tensor:
    """Return the base frequencies, each over its own searched factor.

    Args:
        theta: the base that the model was trained with.
        dim: D.
        rescale_factors: one divisor per pair, ``[D // 2]``.
    Source: Ding et al. 2024, arXiv:2402.13753, eq. 3.

    """
    frequencies: torch.Tensor = 1.0 / (float32_vector(rescale_factors) * theta ** _exponents(dim // 2, dim))
    return frequencies


def longrope_attention_scaling(factor: float, trained_length: int) -> float:
    """Return sqrt(1 + ln(factor) / ln(trained_length)). Source: arXiv:2402.13753, section 3.3."""
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained_length))


def llama3(
    theta: float,
    dim: int,
    factor: float,
    trained_length: int,
    low_freq_factor: float,
    high_freq_factor: float,
) -> torch.Tensor:
    """Return the base frequencies with the slow ones divided by ``factor`` and a blend in between.

    A phase that turns fewer than ``low_freq_factor`` times over the trained length is slow, one that turns
    more than ``high_freq_factor`` times is fast.

    Source: Llama 3.1's reference implementation, meta-llama/llama-models, ``apply_scaling``.
    """
    base = geometric(theta, dim)
    wavelength = 2 * math.pi / base
    slow = wavelength > trained_length / low_freq_factor
    fast = wavelength < trained_length / high_freq_factor
    scaled = torch.where(slow, base / factor, base)
    blend = (trained_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - blend) * scaled / factor + blend * scaled
    return torch.where(~slow & ~fast, blended, scaled)


def proportional(theta: float, dim: int, factor: float, proportion: float) -> torch.Tensor:
    """Return head-wide frequencies of which only the first ``proportion`` turn; the others are zero.

    Unlike partial rotary embeddings, the exponents are relative to the whole head.

    Source: the text layers of Gemma 4, as transformers' rope type ``proportional`` computes them.
    """
    turning = int(proportion * dim // 2)
    still = dim // 2 - turning
    parts = [1.0 / (theta ** _exponents(turning, dim))] if turning else []
    parts += [float32_vector([0.0] * still)] if still else []
    return torch.cat(parts) / factor
