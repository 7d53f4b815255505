"""What styles should give, in float64, from the FP32 frequencies that they hold."""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def phases(inv_freq: torch.Tensor, length: int) -> torch.Tensor:
    """Positions times frequencies, [length, dim / 2]."""
    return torch.outer(torch.arange(length, dtype=torch.float64), inv_freq.detach().double().reshape(-1))


def half_width(inv_freq: torch.Tensor, length: int) -> Pair:
    """Cos and sin [length, dim / 2]."""
    phase = phases(inv_freq, length)
    return phase.cos(), phase.sin()


def twice(inv_freq: torch.Tensor, length: int) -> Pair:
    """Cos and sin [length, dim], the two halves alike."""
    phase = phases(inv_freq, length).repeat(1, 2)
    return phase.cos(), phase.sin()


def twice_in_batch(inv_freq: torch.Tensor, length: int) -> Pair:
    """Cos and sin [1, length, dim], the two halves alike."""
    cos, sin = twice(inv_freq, length)
    return cos[None], sin[None]


def neighbours(inv_freq: torch.Tensor, length: int) -> Pair:
    """Cos and sin [length, dim], two neighbours alike."""
    phase = phases(inv_freq, length).repeat_interleave(2, dim=1)
    return phase.cos(), phase.sin()


def as_real(inv_freq: torch.Tensor, length: int) -> torch.Tensor:
    """Cos and sin of the complex phases, [length, dim / 2, 2]."""
    return torch.stack(half_width(inv_freq, length), -1)
