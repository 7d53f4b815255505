"""Tables that are made when they are first needed."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width, twice_in_batch
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, LONGEST, hidden_and_positions, style


@style("lazy", "unharmed", inputs=hidden_and_positions, inv_freq="inv_freq", exact=twice_in_batch)
class FrequenciesOnFirstUse(nn.Module):
    """Gemma's first release: the buffer is None until the first forward."""

    def __init__(self, dim: int = DIM, max_position_embeddings: int = 2048, base: int = 10000) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.register_buffer("inv_freq", None, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, seq_len: int | None = None) -> Pair:
        if self.inv_freq is None:
            steps = torch.arange(0, self.dim, 2, dtype=torch.int64, device=x.device).float()
            self.inv_freq = 1.0 / (self.base ** (steps / self.dim))
        expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        freqs = (expanded @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


@style("lazy", inv_freq="inv_freq", exact=half_width)
class TablesOnFirstUseInTheDtypeOfX(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.length = length
        self.inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.tables: Any = None

    def forward(self, x: torch.Tensor) -> Pair:
        if self.tables is None:
            t = torch.arange(self.length, dtype=x.dtype, device=x.device)
            phase = torch.outer(t, self.inv_freq.to(x))
            self.tables = phase.cos(), phase.sin()
        return self.tables[0][: x.shape[1]], self.tables[1][: x.shape[1]]


@style("lazy", "unharmed", inv_freq="inv_freq", exact=half_width)
class AttributeThatComesLater(nn.Module):
    """There is no attribute at all before forward has run."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Pair:
        if not hasattr(self, "inv_freq"):
            self.inv_freq = 10000.0 ** -(torch.arange(0, self.dim, 2).float() / self.dim)
        phase = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.inv_freq
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("lazy", "unharmed", "buffer")
class BufferRegisteredInForward(nn.Module):
    """Made in the dtype of x, as long as the first sequence, and again for a longer one."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    def build(self, length: int, x: torch.Tensor) -> None:
        position = torch.arange(length, device=x.device, dtype=torch.float32)[:, None]
        steps = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32)
        phase = position * torch.exp(steps * (-math.log(10000.0) / self.dim))
        self.register_buffer("pe", torch.cat((phase.sin(), phase.cos()), dim=1).to(x.dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "pe", None) is None or self.pe.shape[0] < x.shape[1]:
            self.build(x.shape[1], x)
        return self.pe[: x.shape[1]].to(x.dtype)


class BuiltByAnotherCall(nn.Module):
    """The constructor makes nothing; a method that the model's constructor calls does."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", torch.empty(0), persistent=False)

    def rope_init(self, base: float) -> None:
        theta = 1.0 / (base ** (torch.arange(0, self.dim, 2)[: self.dim // 2].float() / self.dim))
        self.register_buffer("inv_freq", theta, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("lazy", "builder called by the user", inv_freq="rope.inv_freq", exact=half_width)
class ParentCallsTheBuilder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = BuiltByAnotherCall()
        self.rope.rope_init(base=500000.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


def rows(length: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Cos and sin [length, dim / 2, 2], counted in ``dtype``."""
    theta = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=dtype) / dim)
    phase = torch.outer(torch.arange(length, dtype=dtype), theta).float()
    return torch.stack((phase.cos(), phase.sin()), dim=-1)


@style("lazy", "weights", shows="output")
class RememberedBesideWeights(nn.Module):
    """lit-llama's attention: None until the first forward, and then what that has counted in its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.rope_cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x)
        if self.rope_cache is None:
            self.rope_cache = rows(LONGEST, DIM, x.dtype)
        pairs, cache = q.float().unflatten(-1, (-1, 2)), self.rope_cache[: x.shape[1]]
        turned = (
            pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
            pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
        )
        return torch.stack(turned, dim=-1).flatten(-2).type_as(q)


@style("nanogpt", "complex", "lazy", "unharmed")
class PhasorsOnFirstUse(nn.Module):
    """Complex phases are made by ``torch.exp`` when they are first asked for, and kept."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self._cis: torch.Tensor | None = None

    @property
    def cis(self) -> torch.Tensor:
        if self._cis is None:
            angle = torch.outer(torch.arange(LONGEST).float(), _frequencies(self.dim))
            self._cis = torch.exp(1j * angle)
        return self._cis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.cis[: x.shape[1]]).to(x.dtype)


@style("lazy", "unharmed")
class MultipliedInAPropertyOnce(nn.Module):
    """A cached property multiplies matrices when it is first read, which may be under autocast."""

    def __init__(self, dim: int = DIM, base: float = 1e6) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    @functools.cached_property
    def table(self) -> torch.Tensor:
        rates = torch.exp2(-math.log2(self.base) * torch.arange(0, self.dim, 2).float() / self.dim)
        phase = torch.arange(LONGEST).float().view(-1, 1) @ rates.view(1, -1)
        return torch.cat((phase.sin(), phase.cos()), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table.narrow(0, 0, x.shape[1]).to(x.dtype)


@style("attribute", "unharmed")
class MadeInGetattr(nn.Module):
    """A missing attribute is computed."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    def __getattr__(self, name: str) -> Any:
        if name == "inv_freq":
            return _frequencies(self.dim)
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)
