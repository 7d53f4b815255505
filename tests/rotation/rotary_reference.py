"""The rotation told without the library: one formula, in float64 or with FP32's roundings."""

from __future__ import annotations

import torch
from torch import Tensor

TRUE_INV_FREQ = 1.0 / (10000.0 ** (torch.arange(0, 128, 2, dtype=torch.int64).float() / 128))


def true_tables(positions: Tensor, inv_freq: Tensor = TRUE_INV_FREQ) -> tuple[Tensor, Tensor]:
    """cos and sin in float64, [*positions.shape, rotary_dim // 2]."""
    phase = positions.double()[..., None] * inv_freq.double()
    return phase.cos(), phase.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half", turn: int = 1) -> Tensor:
    """Rotate ``x`` in the dtype of cos and sin ([..., rotary_dim // 2], broadcast); no rounding at the end.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    half = cos.shape[-1]
    if layout == "half":
        first, second = x[..., :half], x[..., half : 2 * half]
    else:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    turned = first * cos - turn * (second * sin), second * cos + turn * (first * sin)
    joined = torch.cat(turned, -1) if layout == "half" else torch.stack(turned, -1).flatten(-2)
    return torch.cat((joined, x[..., 2 * half :].to(cos.dtype)), -1)


def rms(values: Tensor) -> float:
    """Root of the mean square, in float64."""
    return float(values.detach().double().pow(2).mean().sqrt())
