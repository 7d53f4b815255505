"""The model, as its authors wrote it. It knows nothing of safe_rope."""

from __future__ import annotations

import torch
from torch import nn


class MyRotaryEmbedding(nn.Module):
    """Cos and sin of position * inv_freq."""

    def __init__(self, dim: int, max_position_embeddings: int = 4096, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [*position_ids.shape, dim], in the dtype of ``x``."""
        phases = position_ids[..., None].float() * self.inv_freq.float()
        both = torch.cat((phases, phases), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Turn each pair of elements by a right angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k, each [batch, heads, length, dim]."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class MyModel(nn.Module):
    """One attention layer over token embeddings."""

    def __init__(self, vocabulary: int = 64, heads: int = 2, dim: int = 128) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.embedding = nn.Embedding(vocabulary, heads * dim)
        self.qkv = nn.Linear(heads * dim, 3 * heads * dim, bias=False)
        self.rotary_emb = MyRotaryEmbedding(dim)
        self.head = nn.Linear(heads * dim, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, length, vocabulary] for token ids [batch, length]."""
        batch, length = input_ids.shape
        x = self.embedding(input_ids)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        positions = torch.arange(length, device=input_ids.device)[None].expand(batch, -1)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary_emb(x, positions))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: torch.Tensor = self.head(y.transpose(1, 2).reshape(batch, length, -1))
        return logits
