"""Attention as well-known models have it in the code that comes with their checkpoints."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from styles.formulas import Pair
from styles.registry import DIM, LONGEST, Arguments, hidden_and_positions, hidden_states, style

HEADS = 2
HEAD_DIM = DIM // HEADS
SEEN = 8


def halves_swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend to the first positions, [batch, heads, length, head_dim], by hand."""
    scores = torch.matmul(q, k[:, :, :SEEN].transpose(2, 3))
    return torch.matmul(functional.softmax(scores, dim=-1), v[:, :, :SEEN]).transpose(1, 2).flatten(2)


@style("family", "unharmed", "ntk", inv_freq="inv_freq", not_on=("vmap",))
class QwenOne(nn.Module):
    """Qwen's first: list of two tables [1, length, 1, dim], another base for longer sequences."""

    def __init__(self, dim: int = DIM, base: int = 10000) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._rotary_pos_emb_cache: Any = None
        self._seq_len_cached = 0
        self._ntk_alpha_cached = 1.0

    def update_rotary_pos_emb_cache(self, seqlen: int, ntk_alpha: float = 1.0) -> None:
        if seqlen > self._seq_len_cached or ntk_alpha != self._ntk_alpha_cached:
            base = self.base * ntk_alpha ** (self.dim / (self.dim - 2))
            steps = torch.arange(0, self.dim, 2, device=self.inv_freq.device).float()
            self.inv_freq = 1.0 / (base ** (steps / self.dim))
            self._seq_len_cached = max(2 * seqlen, 16)
            self._ntk_alpha_cached = ntk_alpha
            seq = torch.arange(self._seq_len_cached, device=self.inv_freq.device)
            freqs = torch.outer(seq.type_as(self.inv_freq), self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1)[None, :, None]
            self._rotary_pos_emb_cache = [emb.cos(), emb.sin()]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        length = x.shape[1]
        alpha = max(2 ** math.ceil(math.log(length / 512, 2) + 1) - 1, 1)
        self.update_rotary_pos_emb_cache(length, alpha)
        return [table[:, :length] for table in self._rotary_pos_emb_cache]


class BaichuanRotary(nn.Module):
    """Attributes, FP32 on purpose; a cast has nothing to reach."""

    def __init__(self, dim: int, max_position_embeddings: int = 64, base: int = 10000) -> None:
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.max_seq_len_cached = max_position_embeddings
        self.fill()

    def fill(self, device: Any = None) -> None:
        t = torch.arange(self.max_seq_len_cached, device=device, dtype=torch.float32)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.cos_cached = emb.cos()[None, None, :, :].to(torch.float32)
        self.sin_cached = emb.sin()[None, None, :, :].to(torch.float32)

    def forward(self, x: torch.Tensor, seq_len: int) -> Pair:
        if seq_len > self.max_seq_len_cached:
            self.max_seq_len_cached = seq_len
            self.inv_freq = self.inv_freq.to(x.device)
            self.fill(x.device)
        return (
            self.cos_cached[:, :, :seq_len, ...].to(torch.float32).to(x.device),
            self.sin_cached[:, :, :seq_len, ...].to(torch.float32).to(x.device),
        )


@style("family", "attribute", shows="output", inputs=hidden_and_positions, inv_freq="rotary_emb.inv_freq")
class Baichuan(nn.Module):
    """One projection for q, k and v; rotation in FP32, rounded once."""

    def __init__(self) -> None:
        super().__init__()
        self.W_pack = nn.Linear(DIM, 3 * DIM, bias=False)
        self.rotary_emb = BaichuanRotary(HEAD_DIM)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        proj = self.W_pack(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        q, k, v = proj
        cos, sin = self.rotary_emb(v, seq_len=x.shape[1])
        cos, sin = (table.squeeze(1).squeeze(0)[position_ids].unsqueeze(1) for table in (cos, sin))
        q = ((q.float() * cos) + (halves_swapped(q.float()) * sin)).to(q.dtype)
        k = ((k.float() * cos) + (halves_swapped(k.float()) * sin)).to(k.dtype)
        return attend(q, k, v)


class InternLM2Rotary(nn.Module):
    """Buffers whose cache grows in the dtype of x."""

    def __init__(self, dim: int, max_position_embeddings: int = 64, base: int = 1000000) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2).float() / self.dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.max_seq_len_cached = -1

    def _set_cos_sin_cache(self, seq_len: int, device: Any, dtype: torch.dtype) -> None:
        self.max_seq_len_cached = seq_len
        t = torch.arange(self.max_seq_len_cached, device=device).to(dtype=self.inv_freq.dtype)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor, seq_len: int) -> Pair:
        if seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len=seq_len, device=x.device, dtype=torch.float32)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


@style("family", "buffer", shows="output", inputs=hidden_and_positions, inv_freq="rotary_emb.inv_freq")
class InternLM2(nn.Module):
    """Grouped q, k and v from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(DIM, 3 * DIM, bias=True)
        self.rotary_emb = InternLM2Rotary(HEAD_DIM)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        qkv = self.wqkv(x).unflatten(-1, (HEADS, 3, HEAD_DIM)).transpose(1, 2)
        q, k, v = qkv.unbind(3)
        cos, sin = self.rotary_emb(v, seq_len=x.shape[1])
        cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
        q, k = q * cos + halves_swapped(q) * sin, k * cos + halves_swapped(k) * sin
        return attend(q, k, v)


class ChatGLMRotary(nn.Module):
    """Makes the whole cache anew for each forward, in the dtype that the config asked for."""

    def __init__(self, dim: int, original_impl: bool = True, dtype: Any = None) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=dtype) / dim))
        self.register_buffer("inv_freq", inv_freq)
        self.dim, self.original_impl = dim, original_impl

    def forward_impl(self, seq_len: int, n_elem: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        steps = torch.arange(0, n_elem, 2, dtype=torch.float, device=device)
        theta = 1.0 / (10000 ** (steps / n_elem))
        seq_idx = torch.arange(seq_len, dtype=torch.float, device=device)
        idx_theta = torch.outer(seq_idx, theta).float()
        cache = torch.stack([torch.cos(idx_theta), torch.sin(idx_theta)], dim=-1)
        return cache.bfloat16() if dtype == torch.bfloat16 else cache

    def forward(self, max_seq_len: int) -> torch.Tensor:
        return self.forward_impl(max_seq_len, self.dim, self.inv_freq.dtype, self.inv_freq.device)


@style("family", "in forward", shows="output", inv_freq="rotary_pos_emb.inv_freq")
class ChatGLM(nn.Module):
    """Half of the channels turn, in pairs of neighbours, in the dtype of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(DIM, 3 * DIM)
        self.rotary_pos_emb = ChatGLMRotary(HEAD_DIM // 2)

    @staticmethod
    def turned(x: torch.Tensor, rope_cache: torch.Tensor) -> torch.Tensor:
        rot_dim = rope_cache.shape[-2] * 2
        x, x_pass = x[..., :rot_dim], x[..., rot_dim:]
        pairs = x.unflatten(-1, (-1, 2))
        cos, sin = rope_cache[..., 0], rope_cache[..., 1]
        out = torch.stack(
            [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], -1
        )
        return torch.cat((out.flatten(-2), x_pass), dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        cache = self.rotary_pos_emb(LONGEST)[: x.shape[1]]
        return attend(self.turned(q, cache), self.turned(k, cache), v)


@style("family", "gptj", "buffer", shows="output")
class GPTJ(nn.Module):
    """Sin and cos side by side in one buffer, gathered by position."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        inv_freq = 1.0 / (10000 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.int64) / HEAD_DIM))
        positions = torch.arange(LONGEST, dtype=torch.int64).float()
        sinusoid = torch.einsum("i , j -> i j", positions, inv_freq).float()
        embed = torch.cat((torch.sin(sinusoid), torch.cos(sinusoid)), dim=1)
        self.register_buffer("embed_positions", embed, persistent=False)

    def turned(self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        sin, cos = sin.repeat_interleave(2, -1), cos.repeat_interleave(2, -1)
        swapped = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return (x * cos) + (swapped * sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        sin, cos = self.embed_positions[: x.shape[1]].to(x.dtype).chunk(2, dim=-1)
        return attend(self.turned(q, sin, cos), self.turned(k, sin, cos), v)


def shifted(dtype: torch.dtype, length: int) -> Arguments:
    """Hidden states, and where the sequence starts."""
    return *hidden_states(dtype, length), 17


@style("family", "offset", inputs=shifted, inv_freq="inv_freq")
class OffsetByACache(nn.Module):
    """The positions start where a cache of keys ends."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, x: torch.Tensor, start: int = 0) -> Pair:
        t = torch.arange(start, start + x.shape[1], device=x.device, dtype=torch.float32)
        emb = torch.outer(t, self.inv_freq.float())
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> torch.Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    t = torch.arange(end, device=freqs.device, dtype=torch.float32)
    return torch.polar(torch.ones_like(torch.outer(t, freqs)), torch.outer(t, freqs))


@dataclasses.dataclass
class GPTConfig:
    """What a nanoGPT fork is configured by."""

    block_size: int = LONGEST
    n_embd: int = DIM
    rope_base: float = 10000.0


class Block(nn.Module):
    """Rotates its input by complex phases that it is given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        xc = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(xc * freqs_cis).flatten(-2).type_as(x)


@style("nanogpt", "complex", shows="output")
class NanoWithFreqsCis(nn.Module):
    """The model keeps complex phases as an attribute; blocks rotate by a slice of it."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config or GPTConfig()
        self.blocks = nn.ModuleList([Block(self.config) for _ in range(2)])
        self.freqs_cis = precompute_freqs_cis(self.config.n_embd, self.config.block_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        freqs_cis = self.freqs_cis[: x.shape[1]].to(x.device)
        for block in self.blocks:
            x = block(x, freqs_cis)
        return x


@style("nanogpt", inv_freq="inv_freq")
class ModdedNanoRotary(nn.Module):
    """The speedrun's: half of the channels turn; tables are kept for the length of the last call."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.inv_freq = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4, dtype=torch.float32)
        self.inv_freq = torch.cat([self.inv_freq, self.inv_freq.new_zeros(dim // 4)])
        self.seq_len_cached: int | None = None
        self.cos_cached: torch.Tensor | None = None
        self.sin_cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        if x.shape[1] != self.seq_len_cached:
            self.seq_len_cached = x.shape[1]
            t = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)
            freqs = torch.outer(t, self.inv_freq).to(x.device)
            self.cos_cached, self.sin_cached = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
        return self.cos_cached, self.sin_cached
