"""Tables in buffers, persistent and not."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from styles.formulas import Pair, half_width, twice
from styles.formulas import cos_and_sin as _rotated
from styles.formulas import frequencies as _frequencies
from styles.registry import DIM, LONGEST, hidden_and_positions, style


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


@style("buffer", inv_freq="inv_freq", exact=half_width)
class PositionsInABuffer(nn.Module):
    """Positions are counted once, as floating-point numbers."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(longest).float(), persistent=False)
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _rotated(torch.outer(self.positions[: x.shape[1]].float(), self.inv_freq.float()), x)


@style("buffer")
class InManyBuffers(nn.Module):
    """A buffer for each block of 64 rows."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.blocks = 0
        for block in phases.split(64):
            self.register_buffer(f"rows_{self.blocks}", block.cos(), persistent=False)
            self.blocks += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([getattr(self, f"rows_{index}") for index in range(self.blocks)])
        return rows[: x.shape[1]].to(x.dtype)


if hasattr(nn, "Buffer"):

    @style("buffer", inv_freq="inv_freq", exact=half_width)
    class AsABuffer(nn.Module):
        """``nn.Buffer`` instead of ``register_buffer``."""

        def __init__(self, dim: int = DIM) -> None:
            super().__init__()
            self.inv_freq = nn.Buffer(_frequencies(dim), persistent=False)

        def forward(self, x: torch.Tensor) -> Pair:
            return _rotated(torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()), x)


@style("offsets", inputs=hidden_and_positions, exact=None)
class GatheredByPositions(nn.Module):
    """``F.embedding`` of positions in a table that is a buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.register_buffer("embed_positions", torch.cat((phase.sin(), phase.cos()), 1), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(position_ids, self.embed_positions).to(x.dtype)


@style("owner", inputs=hidden_and_positions)
class RowsByAnEmbedding(nn.Module):
    """`nn.functional.embedding` reads the rows."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("cos_cached", phases.cos(), persistent=False)
        self.register_buffer("sin_cached", phases.sin(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        cos = nn.functional.embedding(position_ids, self.cos_cached)
        return cos.to(x.dtype), nn.functional.embedding(position_ids, self.sin_cached).to(x.dtype)


@style("buffer", inputs=hidden_and_positions, exact=half_width, inv_freq="frequency")
class FrequencyThatNoFileHolds(nn.Module):
    """A buffer that is not saved: it stays on meta where a file fills the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "frequency", 1e6 ** -(torch.arange(DIM // 2).float() / (DIM // 2)), persistent=False
        )

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        phase = position_ids.squeeze(0).type_as(self.frequency.float())[:, None] * self.frequency.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("fused", roundings=2)
class RotatesItsInput(nn.Module):
    """x cos + rotate_half(x) sin with tables of the module."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim)).repeat(1, 2)
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        turned = torch.cat((-two, one), -1)
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        return (torch.ones_like(x) * cos), (torch.ones_like(turned) * sin)  # type: ignore[return-value]
