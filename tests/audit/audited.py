"""What the tests of the audit share."""

from __future__ import annotations

from typing import Any

import torch
from rotary_models import LENGTH, first_rotary, rotary_modules
from torch import nn

from safe_rope._audit.report import Finding


def of(report: Any, what: str, severity: str = "damaged") -> list[Finding]:
    """The findings about ``what``."""
    return [f for f in report.findings if f.what == what and f.severity == severity]


class Model(nn.Module):
    """A part beside weights, whose dtype is the model's."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.weight = part, nn.Linear(2, 2)


def has_caches(model: nn.Module) -> bool:
    return hasattr(first_rotary(model), "cos_cached")


def use(model: nn.Module, length: int) -> None:
    """Ask every rotary module for a sequence of ``length``, as a long generation does."""
    for rotary in rotary_modules(model).values():
        x = torch.zeros(1, 1, 1, 1)
        if has_caches(model):
            rotary(x, seq_len=length)
        else:
            rotary(x, torch.arange(length)[None])


class PlainRotary(nn.Module):
    """A class that no patch covers, called with a length."""

    def __init__(self, position_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dim, self.base, self.max_position_embeddings = 128, 10000, LENGTH
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 128, 2).float() / 128)))
        positions = torch.arange(LENGTH).to(position_dtype).float()
        phases = torch.outer(positions, self.inv_freq).repeat(1, 2)
        self.max_seq_len_cached = LENGTH
        self.register_buffer("cos_cached", phases.cos())
        self.register_buffer("sin_cached", phases.sin())

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq_len > len(self.cos_cached):
            # Falls for everything: a default device, a default dtype and autocast.
            positions = torch.arange(seq_len) * 1.0
            phases = (positions[:, None] @ self.inv_freq[None]).repeat(1, 2)
            self.cos_cached, self.sin_cached = phases.cos(), phases.sin()
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class LowForward(PlainRotary):
    """Right tensors, but ``forward`` multiplies in bfloat16."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].bfloat16() * self.inv_freq.bfloat16()
        phases = phases.float().repeat(1, 1, 2)
        return phases.cos(), phases.sin()
