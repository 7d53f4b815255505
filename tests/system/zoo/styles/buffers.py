"""Tables in buffers, persistent and not."""

from __future__ import annotations

import math

import torch
from torch import nn

from styles.formulas import Pair, half_width, twice
from styles.registry import DIM, LONGEST, style


@style("buffer", inv_freq="inv_freq", exact=half_width)
class InvFreqBuffer(nn.Module):
    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        phase = torch.outer(t, self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("buffer", "persistent", inv_freq="inv_freq", exact=twice)
class PersistentInvFreq(nn.Module):
    """As GPT-NeoX had it: saved with the weights, and multiplied under einsum."""

    def __init__(self, dim: int = DIM, base: int = 10000) -> None:
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


@style("buffer", "persistent", "sinusoids")
class PersistentSinusoids(nn.Module):
    """The annotated transformer's, as half of the tutorials copy it."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        pe = torch.zeros(length, dim)
        position = torch.arange(0, length).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, dim, 2) * -(math.log(10000.0) / dim))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pe[:, : x.size(1)].to(x.dtype)


@style("buffer", "sinusoids")
class FloatCountedSinusoids(nn.Module):
    """The same with a count of floats."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        position = torch.arange(0.0, length).unsqueeze(1)
        div_term = torch.exp(torch.arange(0.0, dim, 2) * -(math.log(10000.0) / dim))
        pe = torch.zeros(length, dim)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pe[: x.size(1)].to(x.dtype)


@style("buffer", inv_freq="inv_freq", exact=twice)
class CosSinBuffers(nn.Module):
    """Llama as it was first: the frequencies and what is made of them, each a buffer."""

    def __init__(self, dim: int = DIM, max_position_embeddings: int = LONGEST, base: int = 10000) -> None:
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        t = torch.arange(max_position_embeddings, dtype=self.inv_freq.dtype)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos(), persistent=False)
        self.register_buffer("sin_cached", emb.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        length = x.shape[1]
        return self.cos_cached[:length].to(x.dtype), self.sin_cached[:length].to(x.dtype)


@style("buffer")
class StackedBuffer(nn.Module):
    """One buffer [length, dim / 2, 2], as torchtune keeps it."""

    def __init__(self, dim: int = DIM, length: int = LONGEST, base: float = 10000.0) -> None:
        super().__init__()
        theta = 1.0 / (base ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
        index = torch.arange(length, dtype=theta.dtype)
        phase = torch.einsum("i, j -> ij", index, theta).float()
        cache = torch.stack([torch.cos(phase), torch.sin(phase)], dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.cache[: x.shape[1]].to(x.dtype).unbind(-1)
        return cos, sin


@style("buffer", "alias", inv_freq="theta", exact=half_width)
class OneTensorTwoNames(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        freqs = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        self.register_buffer("theta", freqs, persistent=False)
        self.register_buffer("inv_freq", freqs, persistent=True)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).unsqueeze(-1) * self.theta
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("buffer", "in place", inv_freq="inv_freq", exact=half_width)
class FilledInPlace(nn.Module):
    """The buffer is made empty and written to afterwards."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", torch.empty(dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        steps = torch.arange(self.dim // 2, dtype=torch.float32) * 2 / self.dim
        self.inv_freq.copy_(torch.exp(-steps * math.log(self.base)))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("buffer", "float64")
class DoubleTables(nn.Module):
    """Computed in float64 and kept so."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        phase = torch.arange(length, dtype=torch.float64)[:, None] * inv_freq
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


@style("buffer", "returned as kept")
class ReturnedAsKept(nn.Module):
    """Whatever dtype the buffer has by now goes out."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        phase = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("sin_table", phase.sin())
        self.register_buffer("cos_table", phase.cos())

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos_table[: x.shape[1]], self.sin_table[: x.shape[1]]
