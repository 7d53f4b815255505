"""The usual frequencies and tables, and what styles should give in float64 from the FP32 frequencies."""

from __future__ import annotations

import torch

from styles.registry import DIM

Pair = tuple[torch.Tensor, torch.Tensor]


def rates(base: float = 10000.0) -> torch.Tensor:
    """The usual frequencies [dim / 2], in FP32 unless something lowers the constructors."""
    return base ** (-torch.arange(0, DIM, 2).float() / DIM)


def turned(x: torch.Tensor, inv_freq: torch.Tensor) -> Pair:
    """Cos and sin [length, dim / 2] in the dtype of ``x`` [batch, length, ...]."""
    phase = torch.outer(torch.arange(x.shape[1], device=inv_freq.device).type_as(inv_freq), inv_freq)
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def frequencies(dim: int = DIM, base: float = 10000.0) -> torch.Tensor:
    """The usual frequencies [dim / 2] as a quotient."""
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


def cos_and_sin(phase: torch.Tensor, x: torch.Tensor) -> Pair:
    """Cos and sin of the phases in the dtype of ``x``."""
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def turned_in_fp32(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    """Cos and sin [length, dim / 2] in the dtype of ``x``, of an outer product in FP32."""
    phase = torch.outer(torch.arange(x.shape[1], device=x.device).float(), inv_freq.float())
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def waves(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    """Cos and sin [length, dim / 2] in the dtype of ``x``, of integers times FP32."""
    phase = torch.arange(x.shape[1], device=x.device)[:, None] * inv_freq.float()
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def turned_halves(x: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` by the phases, the two halves of its channels against each other."""
    cos, sin = (torch.cat((part, part), -1).to(x.dtype) for part in (phase.cos(), phase.sin()))
    return x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin


def turned_pairs(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` by complex phases, neighbouring channels against each other."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cis).flatten(-2).type_as(x)


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
