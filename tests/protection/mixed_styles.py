"""Models in which a position table meets weights in the model's dtype: each runs, whatever that dtype is.

Each takes ``x [1, length, WIDTH]`` and returns a tensor. Where a table would stay in FP32 while the rest is
in bfloat16, a matrix product or an attention kernel would refuse the mixture.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, HEAD, LENGTH = 32, 2, 16, 40


def steps() -> torch.Tensor:
    return 1.0 / 1e4 ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)


def turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Sinusoids(nn.Module):
    """Added by the module's own forward, and normalised by a layer with weights."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__()
        position = torch.arange(length, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, WIDTH, 2, dtype=torch.float) * (-math.log(1e4) / WIDTH))
        pe = torch.zeros(length, WIDTH, dtype=torch.float)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x + self.pe[: x.shape[1]]))


class Attention(nn.Module):
    """q and k are rotated by whatever ``cos_sin`` gives; v is not."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def cos_sin(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        cos, sin = self.cos_sin(x)
        q, k = (part * cos + turned(part) * sin for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class OwnsTables(Attention):
    def __init__(self, length: int = LENGTH) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(length, dtype=torch.float32), steps()).repeat(1, 2)
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def cos_sin(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]


class OwnsFrequencies(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", steps(), persistent=False)

    def cos_sin(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)
        phase = torch.outer(t, self.inv_freq).repeat(1, 2)
        return phase.cos(), phase.sin()


class Rope(nn.Module):
    """Returns cos and sin in the dtype of its own frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", steps(), persistent=False)

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.arange(length, device=self.inv_freq.device, dtype=torch.float32)
        phase = torch.outer(t, self.inv_freq.float()).repeat(1, 2)
        return phase.cos().to(self.inv_freq.dtype), phase.sin().to(dtype=self.inv_freq.dtype)


class InTheDtypeOfItsFrequencies(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()

    def cos_sin(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rope(x.shape[1])


class RopeOfChatGLM(nn.Module):
    """One cache of cos and sin, in the dtype of its frequencies (Kolors)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", steps())

    def forward_impl(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        theta = 1.0 / (10000 ** (torch.arange(0, HEAD, 2, dtype=torch.float) / HEAD))
        phase = torch.outer(torch.arange(length, dtype=torch.float), theta).float()
        cache = torch.stack([torch.cos(phase), torch.sin(phase)], dim=-1)
        return cache.to(dtype) if dtype in (torch.float16, torch.bfloat16, torch.int8) else cache

    def forward(self, length: int) -> torch.Tensor:
        return self.forward_impl(length, dtype=self.inv_freq.dtype)


class OfChatGLM(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = RopeOfChatGLM()

    def cos_sin(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rope(x.shape[1]).unbind(-1)
        return cos.repeat(1, 2), sin.repeat(1, 2)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LENGTH, dtype=torch.float32), steps()).repeat(1, 2)
        self.register_buffer("table", torch.cat((phase.sin(), phase.cos()), -1), persistent=False)

    def rows(self, length: int) -> torch.Tensor:
        return self.table[:length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows(x.shape[1])


class ReadByItsParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.positions.table[: x.shape[1]])


class ReadByAnotherMethod(ReadByItsParent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.positions.rows(x.shape[1]))


class WithTime(nn.Module):
    """Frequencies of a time, in the module that has the layers which follow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", steps(), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(HEAD, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = 100 * x[:, :, :1] * self.freqs
        return self.mlp(torch.cat((phase.cos(), phase.sin()), dim=-1))


class RelativeCoordinates(nn.Module):
    """As timm's: log-spaced coordinates go through a small network."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        axis = torch.arange(-(window - 1), window, dtype=torch.float32)
        table = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
        table = torch.sign(table) * torch.log2(1 + table.abs()) / np.log2(8)
        self.register_buffer("relative_coords_table", table, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def get_bias(self) -> torch.Tensor:
        return self.mlp(self.relative_coords_table).flatten()[:WIDTH]

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.get_bias()


class AsksForItsBias(nn.Module):
    """As maxvit_rmlp with fused attention: forward of the position module never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rel_pos = RelativeCoordinates()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.rel_pos.get_bias())


class RunsItsBias(AsksForItsBias):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.rel_pos(x))


class Gain(nn.Module):
    """A buffer in FP32 that has nothing to do with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.full((WIDTH,), 1.5, dtype=torch.float32))
        self.register_buffer("mean", torch.tensor([0.25] * WIDTH, dtype=torch.float32), persistent=False)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer((x - self.mean) * self.gain)


STYLES: dict[str, Any] = {
    style.__name__: style
    for style in (
        Sinusoids,
        OwnsTables,
        OwnsFrequencies,
        InTheDtypeOfItsFrequencies,
        OfChatGLM,
        ReadByItsParent,
        ReadByAnotherMethod,
        WithTime,
        AsksForItsBias,
        RunsItsBias,
        Gain,
    )
}
