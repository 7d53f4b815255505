"""Position modules for sound, points, molecules, proteins and times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair, neighbours, twice
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, LONGEST, style


@style("audio", "lazy")
class ConformerRelative(nn.Module):
    """ESPnet's relative positions: a table from both sides, extended when it is too short."""

    def __init__(self, dim: int = DIM, longest: int = 400) -> None:
        super().__init__()
        self.dim = dim
        self.pe: torch.Tensor | None = None
        self.extend_pe(torch.tensor(0.0).expand(1, longest))

    def extend_pe(self, x: torch.Tensor) -> None:
        if self.pe is not None and self.pe.size(1) >= x.size(1) * 2 - 1:
            if self.pe.dtype != x.dtype or self.pe.device != x.device:
                self.pe = self.pe.to(dtype=x.dtype, device=x.device)
            return
        positive, negative = torch.zeros(x.size(1), self.dim), torch.zeros(x.size(1), self.dim)
        position = torch.arange(0, x.size(1), dtype=torch.float32).unsqueeze(1)
        div_term = torch.exp(
            torch.arange(0, self.dim, 2, dtype=torch.float32) * -(math.log(10000.0) / self.dim)
        )
        positive[:, 0::2], positive[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        negative[:, 0::2], negative[:, 1::2] = (
            torch.sin(-1 * position * div_term),
            torch.cos(-1 * position * div_term),
        )
        pe = torch.cat([torch.flip(positive, [0]).unsqueeze(0), negative[1:].unsqueeze(0)], dim=1)
        self.pe = pe.to(device=x.device, dtype=x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extend_pe(x)
        assert self.pe is not None
        middle = self.pe.size(1) // 2
        return self.pe[:, middle - x.size(1) + 1 : middle + x.size(1)]


@style("audio", "conv", not_on=("meta",))
class SinesInAConvolution(nn.Module):
    """Fixed sines are the weight of a frozen convolution; on meta nothing tells that weight from another."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        table = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.conv = nn.Conv1d(1, dim, LONGEST, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(torch.cat((table.cos(), table.sin()), 1).t()[:, None])
        self.conv.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv.weight[:, 0, : x.shape[1]].to(x.dtype)


@style("audio", "timescales")
class WhisperSinusoids(nn.Module):
    """OpenAI's ``sinusoids``, a buffer that is read with ``.to(x.dtype)``."""

    def __init__(self, channels: int = DIM) -> None:
        super().__init__()
        increment = np.log(10000) / (channels // 2 - 1)
        inv = torch.exp(-increment * torch.arange(channels // 2))
        scaled = torch.arange(LONGEST)[:, np.newaxis] * inv[np.newaxis, :]
        self.register_buffer("positional_embedding", torch.cat([torch.sin(scaled), torch.cos(scaled)], dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positional_embedding[: x.shape[1]].to(x.dtype)


@style("radial")
class GaussianSmearing(nn.Module):
    """SchNet's centres of distances: counted out by linspace, and fed to a Gaussian."""

    def __init__(self, count: int = 16) -> None:
        super().__init__()
        offset = torch.linspace(0.0, 10.0, count)
        self.coeff = -0.5 / (offset[1] - offset[0]).item() ** 2
        self.register_buffer("offset", offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(x.shape[1]).float()[:, None] / 64
        return torch.exp(self.coeff * (distance - self.offset.float()) ** 2).to(x.dtype)


@style("points", "nerf")
class NerfBands(nn.Module):
    """NeRF's bands: powers of two, whatever they are called."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        bands = 2.0 ** torch.linspace(0.0, count - 1, count) * math.pi
        self.register_buffer("bands", bands, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = (torch.arange(x.shape[1]).float() / 64)[:, None] * self.bands.float()
        return torch.cat((phase.sin(), phase.cos()), -1).to(x.dtype)


@style("protein", "interleaved", exact=neighbours, inv_freq="inv_freq")
class AlphaFoldLike(nn.Module):
    """Relative positions of residues, frequencies interleaved by stack and flatten."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float()[None]
        phase = torch.stack((phase, phase), -1).flatten(-2)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("twice", exact=twice, inv_freq="rotary_emb.inv_freq", widens=True)
class EsmRotary(nn.Module):
    """ESM-2 of fair-esm: tables for the longest sequence so far, kept in the dtype that they are made in."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rotary_emb = EsmRotaryEmbedding(dim)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.rotary_emb(x)
        return cos[0].to(x.dtype), sin[0].to(x.dtype)


class EsmRotaryEmbedding(nn.Module):
    """What `EsmRotary` holds."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)
        self._seq_len_cached: int | None = None
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None

    def _update(self, x: torch.Tensor, seq_dimension: int = 1) -> tuple[Any, Any]:
        seq_len = x.shape[seq_dimension]
        if seq_len != self._seq_len_cached or self._cos_cached.device != x.device:  # type: ignore[union-attr]
            self._seq_len_cached = seq_len
            t = torch.arange(x.shape[seq_dimension], device=x.device).type_as(self.inv_freq)
            freqs = torch.einsum("i,j->ij", t, self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1).to(x.device)
            self._cos_cached = emb.cos()[None, :, :]
            self._sin_cached = emb.sin()[None, :, :]
        return self._cos_cached, self._sin_cached

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        return self._update(x)


@style("time", "rff")
class RandomFeatureTimes(nn.Module):
    """Random Fourier features of times from a seed: no positions that are counted."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("freqs", torch.randn(dim // 2, generator=generator, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.freqs, x)
