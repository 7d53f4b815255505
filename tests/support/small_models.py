"""Small causal models of each kind of protection: input_ids go in, logits come out.

``llama``: a full protection. ``dynamic``: one whose frequencies follow the length. ``gptj``: pinned tables
that its attention holds. ``sinusoids``: a pinned table with a LayerNorm. ``own``: besides, attention that
owns its frequencies. ``growing``: attention whose module rotates q and k by a cache that grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

WIDTH, HEADS, HEAD, VOCABULARY, LONGEST, LAYERS = 32, 2, 16, 97, 64, 1
SHORT = 8
"""The length from which on ``dynamic`` and ``growing`` have to make new tables."""


class Sinusoids(nn.Module):
    """Added and normalised by one module."""

    def __init__(self) -> None:
        super().__init__()
        position = torch.arange(LONGEST, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, WIDTH, 2, dtype=torch.float) * (-math.log(1e4) / WIDTH))
        pe = torch.zeros(LONGEST, WIDTH)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe, persistent=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.pe[: x.shape[1]])


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    """Makes cos and sin itself, from frequencies of its own."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 1e4 ** (torch.arange(0, HEAD, 2, dtype=torch.int64).float() / HEAD)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.arange(q.shape[-2], device=q.device).type_as(self.inv_freq)
        phase = torch.outer(t, self.inv_freq).repeat(1, 2)
        cos, sin = phase.cos(), phase.sin()
        return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = self.rotated(q, k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class GrowingRope(nn.Module):
    """Rotates q and k by rows for a few positions, made anew for more when they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 1e4 ** (torch.arange(0, HEAD, 2, dtype=torch.int64).float() / HEAD)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.grow(SHORT, torch.get_default_dtype())

    def grow(self, length: int, dtype: torch.dtype) -> None:
        self.rows = length
        t = torch.arange(length, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        phase = torch.outer(t, self.inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", phase.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", phase.sin().to(dtype), persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = q.shape[-2]
        if length > self.rows:
            self.grow(length, q.dtype)
        cos, sin = self.cos_cached[:length].to(q.dtype), self.sin_cached[:length].to(q.dtype)
        return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


class GrowingAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.inv_freq
        self.rope = GrowingRope()

    def rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rope(q, k)


class Own(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Sinusoids()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.positions(self.embedding(input_ids))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _llama(**more: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        **{"max_position_embeddings": LONGEST, **more},
    )
    config.use_cache = False
    return transformers.LlamaForCausalLM(config)


def _dynamic() -> Any:
    # Releases before 4.45 say "type".
    scaling = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    if transformers.__version__ < "4.45":
        del scaling["rope_type"]
    return _llama(max_position_embeddings=SHORT, rope_scaling=scaling)


def _gptj() -> Any:
    config = transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        rotary_dim=8,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.use_cache = False
    return transformers.GPTJForCausalLM(config)


KINDS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "dynamic": _dynamic,
    "gptj": _gptj,
    "sinusoids": lambda: Own(lambda: nn.Linear(WIDTH, WIDTH)),
    "own": lambda: Own(Attention),
    "growing": lambda: Own(GrowingAttention),
}


def build(kind: str) -> Any:
    """A model in FP32 whose weights are the same each time, and the same in bfloat16."""
    model = KINDS[kind]().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * (1.5 / parameter.shape[-1] ** 0.5)
            parameter.copy_(values.bfloat16())
    return model


def tokens(length: int = 20, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def logits(result: Any) -> torch.Tensor:
    """The logits in what a model of any kind, compiled, exported or not, returns."""
    if isinstance(result, torch.Tensor):
        return result
    return result["logits"] if isinstance(result, dict) else result[0]
