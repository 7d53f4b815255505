"""Tables in parameters that nobody trains."""

from __future__ import annotations

import math

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, Arguments, hidden_and_positions, hidden_states, style


def sinusoids(length: int, dim: int) -> torch.Tensor:
    position = torch.arange(length, dtype=torch.float).unsqueeze(1)
    term = torch.exp(torch.arange(0, dim, 2, dtype=torch.float) * -(math.log(10000.0) / dim))
    return torch.stack((torch.sin(position * term), torch.cos(position * term)), dim=-1).flatten(1)


@style("parameter", "frozen", inv_freq="inv_freq", exact=half_width)
class FrozenFrequencies(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.inv_freq = nn.Parameter(inv_freq, requires_grad=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1], device=x.device)[:, None] * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("parameter", "frozen", "sinusoids")
class FrozenSinusoids(nn.Module):
    """Whisper's encoder and many vision models: a finished table, saved with the weights."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, length, dim), requires_grad=False)
        self.pos_embed.data.copy_(sinusoids(length, dim).unsqueeze(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pos_embed[:, : x.shape[1]].to(x.dtype)


@style("parameter", "frozen", "embedding", inputs=hidden_and_positions)
class FrozenEmbedding(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(sinusoids(length, dim), freeze=True)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(position_ids).to(x.dtype)


def positions(dtype: torch.dtype, length: int) -> Arguments:
    """The number of positions, and hidden states."""
    return length, *hidden_states(dtype, length)


@style("parameter", "frozen", "embedding", "subclass", inputs=positions)
class SinusoidalEmbedding(nn.Embedding):
    """Marian's: an Embedding that fills its own weight in place."""

    def __init__(self, num_positions: int = LONGEST, embedding_dim: int = DIM) -> None:
        super().__init__(num_positions, embedding_dim)
        self.weight = self._init_weight(self.weight)

    @staticmethod
    def _init_weight(out: nn.Parameter) -> nn.Parameter:
        n_pos, dim = LONGEST, DIM
        out.requires_grad = False
        out.data = sinusoids(n_pos, dim).to(out.dtype)
        out.detach_()
        return out

    @torch.no_grad()
    def forward(self, length: int, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.arange(length, dtype=torch.long, device=self.weight.device))


@style("parameter", "frozen", "list", inv_freq="theta.1", exact=half_width)
class FrozenParameterList(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        bases = (500.0, 10000.0)
        steps = torch.arange(0, dim, 2).float() / dim
        self.theta = nn.ParameterList(nn.Parameter(base**-steps, requires_grad=False) for base in bases)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).float()[:, None] * self.theta[1].float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("parameter", "frozen", "later", inv_freq="freqs", exact=half_width)
class FrozenAfterwards(nn.Module):
    """The whole module is frozen by its model."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.pow(10000.0, -torch.arange(0, dim, 2) / dim))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Pair:
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.freqs.float())
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
