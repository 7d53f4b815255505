"""A rotary module and a half rotation as people write them for themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    def __init__(self, dim: int = 16, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phase = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((phase, phase), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
