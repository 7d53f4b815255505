"""Position modules in the styles of code that comes with checkpoints, which no release of transformers has.

One class for each place where such code keeps its tables. Each ``forward(x, length)`` returns cos and sin for
the first ``length`` positions (an ALiBi module the bias, twice); ``TABLES`` names what holds positions.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


def frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))


def cos_sin(dim: int, length: int) -> Pair:
    phase = torch.outer(torch.arange(length) * 1.0, frequencies(dim))
    return phase.cos(), phase.sin()


class CachedBuffers(nn.Module):
    """Grown in forward, in the dtype of x; the first forward always makes the cache anew."""

    TABLES = ("inv_freq", "cos_cached", "sin_cached")

    def __init__(self, dim: int, max_position_embeddings: int = 64, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.register_buffer("inv_freq", frequencies(dim, base), persistent=False)
        self.fill(max_position_embeddings, torch.get_default_dtype())
        self.max_seq_len_cached: int | None = None

    def fill(self, seq_len: int, dtype: torch.dtype) -> None:
        self.max_seq_len_cached = seq_len
        t = torch.arange(seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        emb = torch.outer(t, self.inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor, seq_len: int) -> Pair:
        if self.max_seq_len_cached is None or seq_len > self.max_seq_len_cached:
            self.fill(seq_len, x.dtype)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class YarnBuffers(CachedBuffers):
    """The frequencies are interpolated where the cache is filled, and cos and sin scaled."""

    def fill(self, seq_len: int, dtype: torch.dtype) -> None:
        self.max_seq_len_cached = seq_len
        ramp = torch.clamp((torch.arange(self.dim // 2, dtype=torch.float32) - 2) / 5, 0, 1)
        free = frequencies(self.dim, self.base)
        self.register_buffer("inv_freq", free / 40 * ramp + free * (1 - ramp), persistent=False)
        t = torch.arange(seq_len, dtype=torch.float32)
        emb = torch.outer(t, self.inv_freq).repeat(1, 2)
        scale = 0.1 * math.log(40) + 1.0
        self.register_buffer("cos_cached", (emb.cos() * scale).to(dtype), persistent=False)
        self.register_buffer("sin_cached", (emb.sin() * scale).to(dtype), persistent=False)


class PlainAttributes(nn.Module):
    """Attributes that are no buffers, [1, 1, length, dim]."""

    TABLES = ("inv_freq", "cos_cached", "sin_cached")

    def __init__(self, dim: int, max_position_embeddings: int = 64, base: int = 10000) -> None:
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.fill(max_position_embeddings)

    def fill(self, seq_len: int) -> None:
        self.max_seq_len_cached = seq_len
        t = torch.arange(seq_len, dtype=torch.float32)
        emb = torch.outer(t, self.inv_freq).repeat(1, 2)[None, None]
        self.cos_cached, self.sin_cached = emb.cos().to(torch.float32), emb.sin().to(torch.float32)

    def forward(self, x: torch.Tensor, seq_len: int) -> Pair:
        if seq_len > self.max_seq_len_cached:
            self.fill(seq_len)
        return self.cos_cached[0, 0, :seq_len].to(x.dtype), self.sin_cached[0, 0, :seq_len].to(x.dtype)


class ListOfTables(nn.Module):
    """A list of cos and sin, [1, length, 1, dim] each."""

    TABLES = ("inv_freq", "_rotary_pos_emb_cache.0", "_rotary_pos_emb_cache.1")

    def __init__(self, dim: int, length: int = 64) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", frequencies(dim), persistent=False)
        self._seq_len_cached = 0
        self.update(length)

    def update(self, length: int) -> None:
        if length > self._seq_len_cached:
            self._seq_len_cached = length
            self.inv_freq = frequencies(self.dim).to(self.inv_freq.device)
            cos, sin = cos_sin(self.dim, length)
            self._rotary_pos_emb_cache = [cos.repeat(1, 2)[None, :, None], sin.repeat(1, 2)[None, :, None]]

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        self.update(length)
        cos, sin = self._rotary_pos_emb_cache
        return cos[0, :length, 0].to(x.dtype), sin[0, :length, 0].to(x.dtype)


class DictOfTables(nn.Module):
    TABLES = ("tables.cos", "tables.sin")

    def __init__(self, dim: int, length: int = 512) -> None:
        super().__init__()
        self.tables = dict(zip(("cos", "sin"), cos_sin(dim, length), strict=True))

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        return self.tables["cos"][:length].to(x.dtype), self.tables["sin"][:length].to(x.dtype)


class TupleOfTables(nn.Module):
    TABLES = ("freqs.0", "freqs.1")

    def __init__(self, dim: int, length: int = 512) -> None:
        super().__init__()
        self.freqs = cos_sin(dim, length)

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        return self.freqs[0][:length].to(x.dtype), self.freqs[1][:length].to(x.dtype)


class Holder(nn.Module):
    """Tables in an object that is no module."""

    TABLES = ("rope.cos", "rope.sin")

    def __init__(self, dim: int, length: int = 512) -> None:
        super().__init__()
        cos, sin = cos_sin(dim, length)
        self.rope = SimpleNamespace(cos=cos, sin=sin)

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        return self.rope.cos[:length].to(x.dtype), self.rope.sin[:length].to(x.dtype)


@functools.lru_cache(maxsize=4)
def remembered(dim: int, length: int) -> Pair:
    return cos_sin(dim, length)


class Remembered(nn.Module):
    """Tables that a function remembers and hands to every layer."""

    TABLES = ("cos", "sin")

    def __init__(self, dim: int, length: int = 512) -> None:
        super().__init__()
        self.cos, self.sin = remembered(dim, length)

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        return self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)


class InterleavedCache(nn.Module):
    """One buffer [length, dim / 2, 2]."""

    TABLES = ("rope_cache",)

    def __init__(self, dim: int, length: int = 512) -> None:
        super().__init__()
        self.register_buffer("rope_cache", torch.stack(cos_sin(dim, length), -1), persistent=False)

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        cos, sin = self.rope_cache[:length].to(x.dtype).unbind(-1)
        return cos, sin


class ComplexAttribute(nn.Module):
    TABLES = ("freqs_cis",)

    def __init__(self, dim: int, length: int = 512) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(length, dtype=torch.float32), frequencies(dim))
        self.freqs_cis = torch.polar(torch.ones_like(phase), phase)

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        cis = torch.view_as_real(self.freqs_cis[:length])
        return cis[..., 0].to(x.dtype), cis[..., 1].to(x.dtype)


class MadeOnFirstUse(nn.Module):
    """The frequencies are None until the first forward, and stay from then on."""

    TABLES = ("inv_freq",)

    def __init__(self, dim: int, max_position_embeddings: int = 2048, base: int = 10000) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.register_buffer("inv_freq", None, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, seq_len: int | None = None) -> Pair:
        if self.inv_freq is None:
            steps = torch.arange(0, self.dim, 2, dtype=torch.int64, device=x.device).float()
            self.inv_freq = 1.0 / (self.base ** (steps / self.dim))
        expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        phase = (expanded @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((phase, phase), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class Alibi(nn.Module):
    TABLES = ("slopes", "alibi_bias")

    def __init__(self, heads: int, length: int = 512) -> None:
        super().__init__()
        m = torch.arange(1.0, heads + 1) * (8 / heads)
        self.slopes = 1.0 / torch.pow(2, m)
        distance = torch.arange(1.0 - length, 1)
        bias = self.slopes.view(1, heads, 1, 1) * distance.view(1, 1, 1, length)
        self.register_buffer("alibi_bias", bias, persistent=False)

    def forward(self, x: torch.Tensor, length: int) -> Pair:
        bias = self.alibi_bias[0, :, 0, -length:].to(x.dtype).transpose(0, 1)
        return bias, bias


STYLES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        CachedBuffers,
        YarnBuffers,
        PlainAttributes,
        ListOfTables,
        DictOfTables,
        TupleOfTables,
        Holder,
        Remembered,
        InterleavedCache,
        ComplexAttribute,
        MadeOnFirstUse,
        Alibi,
    )
}
DIM = 16


class StyledModel(nn.Module):
    """Two layers, each with a position module of its own."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(style) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.rotary = STYLES[style](DIM)
        self.projection = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = ask(self.rotary, x, x.shape[-2])
        width = min(cos.shape[-1], DIM)
        return self.projection(x) * (cos + 2 * sin)[..., :width].repeat(1, DIM // width)


def ask(rotary: nn.Module, x: torch.Tensor, length: int) -> Pair:
    if isinstance(rotary, MadeOnFirstUse):
        cos, sin = rotary(x, torch.arange(length)[None])
        return cos[0], sin[0]
    result: Pair = rotary(x, length)
    return result
