"""Sinusoids that are added to what goes on being computed with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from styles.in_forward import timesteps
from styles.registry import DIM, LONGEST, style


def table(length: int, dim: int) -> torch.Tensor:
    """As ESPnet and many others have it: every dtype is said."""
    pe = torch.zeros(length, dim)
    position = torch.arange(0, length, dtype=torch.float32).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, dim, 2, dtype=torch.float32) * -(math.log(10000.0) / dim))
    pe[:, 0::2] = torch.sin(position * div_term)
    pe[:, 1::2] = torch.cos(position * div_term)
    return pe


@style("sinusoids", "added", "buffer", shows="output")
class AddedBeforeALinear(nn.Module):
    """The whole of an embedding in one module: what is added has to have the dtype of the weights."""

    def __init__(self) -> None:
        super().__init__()
        position = torch.arange(LONGEST, dtype=torch.float)[:, None]
        angle = position * torch.exp(torch.arange(0, DIM, 2, dtype=torch.float) * (-math.log(1e4) / DIM))
        self.register_buffer("pe", torch.cat((angle.sin(), angle.cos()), dim=-1))
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x + self.pe[: x.shape[1]])


class PositionalEncoding(nn.Module):
    """The tutorial's, in a module of its own."""

    def __init__(self, dim: int = DIM, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", table(LONGEST, dim).unsqueeze(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x + self.pe[:, : x.size(1)])


@style("sinusoids", "added", "buffer", shows="output")
class AddedByAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoding = PositionalEncoding()
        self.norm = nn.LayerNorm(DIM)
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.norm(self.encoding(x)))


@style("sinusoids", "unharmed", "added", "attribute", shows="output")
class AddedFromAnAttribute(nn.Module):
    """ESPnet's: extended in forward, and cast to what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.pe: Any = None
        self.extend_pe(torch.tensor(0.0).expand(1, 64))
        self.lin = nn.Linear(DIM, DIM)

    def extend_pe(self, x: torch.Tensor) -> None:
        if self.pe is not None and self.pe.size(1) >= x.size(1):
            if self.pe.dtype != x.dtype or self.pe.device != x.device:
                self.pe = self.pe.to(dtype=x.dtype, device=x.device)
            return
        self.pe = table(x.size(1), DIM).unsqueeze(0).to(device=x.device, dtype=x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extend_pe(x)
        return self.lin(x * math.sqrt(DIM) / 8 + self.pe[:, : x.size(1)])


@style("sinusoids", "added", "frozen", shows="output")
class AddedFromAFrozenEmbedding(nn.Module):
    """Whisper's encoder: a frozen embedding, added as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_positions = nn.Embedding(LONGEST, DIM)
        self.embed_positions.requires_grad_(False)
        self.embed_positions.weight.data.copy_(table(LONGEST, DIM))
        self.layer_norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(x + self.embed_positions(torch.arange(x.shape[1])))


@style("sinusoids", "time", "mlp", shows="output", inputs=timesteps)
class TimeEmbeddingWithItsMlp(nn.Module):
    """Frequencies in a buffer; times take its dtype, and go through the MLP."""

    def __init__(self) -> None:
        super().__init__()
        half = DIM // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("freqs", freqs, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))

    def forward(self, timesteps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        args = timesteps[:, None].to(self.freqs.dtype) * self.freqs
        return self.mlp(torch.cat([args.cos(), args.sin()], dim=-1))


@style("sinusoids", "unharmed", "time", "mlp", shows="output", inputs=timesteps)
class TimeEmbeddingCast(nn.Module):
    """DiT's: made in forward, FP32, and cast to the dtype of the first weight."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))

    @staticmethod
    def timestep_embedding(t: torch.Tensor, dim: int, max_period: int = 10000) -> torch.Tensor:
        half = dim // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(0, half, dtype=torch.float32) / half)
        args = t[:, None].float() * freqs[None].to(device=t.device)
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, timesteps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.timestep_embedding(timesteps, DIM).to(self.mlp[0].weight.dtype))


@style("sinusoids", "offset", "buffer")
class PaddingHasARow(nn.Module):
    """Fairseq's: the row of the padding index is zero, and positions start after it."""

    def __init__(self, dim: int = DIM, padding_idx: int = 1) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        half = dim // 2
        emb = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
        emb = torch.arange(LONGEST + 2, dtype=torch.float).unsqueeze(1) * emb.unsqueeze(0)
        weights = torch.cat([torch.sin(emb), torch.cos(emb)], dim=1)
        weights[padding_idx, :] = 0
        self.weights = weights
        self.register_buffer("_float_tensor", torch.FloatTensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weights = self.weights.to(self._float_tensor)
        position = torch.arange(x.shape[1]) + self.padding_idx + 1
        return self.weights.index_select(0, position).to(x.dtype)
