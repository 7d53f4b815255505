"""Tables in modules that have weights."""

from __future__ import annotations

import math
from collections import namedtuple

import torch
from torch import nn

from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_halves as _turned_halves
from styles.formulas import turned_pairs as _turned_pairs
from styles.registry import DIM, LONGEST, hidden_and_positions, style


@style("weights", "plain name", shows="output", roundings=4)
class PlainNameBesideWeights(nn.Module):
    """Frequencies are called ``w``, and stand beside a projection."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("w", _frequencies(dim), persistent=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.w.float())
        return self.proj(torch.cat((phase.cos(), phase.sin()), -1).to(x.dtype))


@style("weights", "time", shows="output", roundings=4)
class TimeMlpWithEmb(nn.Module):
    """A diffusion model's: ``emb`` is a buffer, positions are timesteps."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("emb", torch.exp(torch.arange(dim // 2) * -(math.log(10000) / (dim // 2 - 1))))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        emb = torch.arange(x.shape[1]).float()[:, None] * self.emb.float()[None, :]
        return self.mlp(torch.cat((emb.sin(), emb.cos()), dim=-1).to(x.dtype))


@style("beside weights", shows="output", inputs=hidden_and_positions)
class SpeedsFromAListBesideWeights(nn.Module):
    """Numbers that Python has computed, under a name that says nothing of frequencies, beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speeds", torch.FloatTensor([1e4 ** (-2 * i / DIM) for i in range(DIM // 2)]))
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return _turned_halves(self.proj(x), position_ids[0].float()[:, None] * self.speeds[None, :])


@style("beside weights", "complex", shows="output")
class TurnedByAnExponentialBesideWeights(nn.Module):
    """Turns by ``torch.exp(1j * phase)``, and by neither sine nor cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_inv", torch.pow(1e4, -torch.arange(0, DIM, 2) / DIM), persistent=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self._inv.float())
        return _turned_pairs(self.proj(x), torch.exp(1j * phase))


@style("beside weights", "complex")
class ExponentialReturnedBesideWeights(nn.Module):
    """Returns ``torch.exp(1j * phase)`` of frequencies that have the model's dtype."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1e4 ** (-torch.arange(0, DIM, 2) / DIM)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(1j * (torch.arange(x.shape[1])[:, None] * self.inv_freq[None, :]))


Named = namedtuple("Named", ["theta"])


@style("beside weights", "counts", shows="output")
class CountsInTheDtypeOfWhatWeightsGive(nn.Module):
    """Counts in the dtype of a projection, which autocast lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Named(10000 ** torch.linspace(0, -1 + 2 / DIM, DIM // 2))
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x)
        counts = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return _turned_halves(x, self.store[0].float() * counts[:, None])


@style("mamba", shows="output", roundings=4)
class MambaWithRope(nn.Module):
    """A state space's A_log is a parameter; the rotary tables of the same module are buffers."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        a = torch.arange(1, 17, dtype=torch.float32).repeat(dim, 1)
        self.A_log = nn.Parameter(torch.log(a))
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@style("transformer-xl", shows="output", roundings=2)
class CountedBackwardsBesideWeights(nn.Module):
    """Transformer-XL's: positions are counted down in the dtype of the activations."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))
        self.r = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1] - 1, -1, -1.0, dtype=x.dtype)
        phase = torch.outer(positions, self.inv_freq)
        return self.r(torch.cat((phase.sin(), phase.cos()), dim=-1).to(x.dtype))


@style("cope", shows="output", roundings=4)
class ContextualPositions(nn.Module):
    """CoPE: positions are sums of gates, looked up in a table of sinusoids by interpolation."""

    def __init__(self, dim: int = DIM, longest: int = 64) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("pos_emb", torch.cat((phase.cos(), phase.sin()), -1), persistent=False)
        self.longest = longest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).float().clamp(max=self.longest - 1) / 1.5
        low, high = positions.floor().long(), positions.ceil().long()
        weight = (positions - low)[:, None].to(self.pos_emb.dtype)
        table = self.pos_emb[high] * weight + self.pos_emb[low] * (1 - weight)
        return table.to(x.dtype)
