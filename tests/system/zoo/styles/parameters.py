"""Tables in parameters that nobody trains."""

from __future__ import annotations

import math

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
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


@style("parameter")
class InAParameterDict(nn.Module):
    """Frozen parameters in a dictionary."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.tables = nn.ParameterDict(
            {
                "cos": nn.Parameter(phases.cos(), requires_grad=False),
                "sin": nn.Parameter(phases.sin(), requires_grad=False),
            }
        )

    def forward(self, x: torch.Tensor) -> Pair:
        return self.tables["cos"][: x.shape[1]].to(x.dtype), self.tables["sin"][: x.shape[1]].to(x.dtype)


@style("parameters", "dict")
class FrozenParameterDict(nn.Module):
    """Frozen tables in a ParameterDict."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.tables = nn.ParameterDict(
            {
                "cos": nn.Parameter(phase.cos(), requires_grad=False),
                "sin": nn.Parameter(phase.sin(), requires_grad=False),
            }
        )

    def forward(self, x: torch.Tensor) -> Pair:
        return self.tables["cos"][: x.shape[1]].to(x.dtype), self.tables["sin"][: x.shape[1]].to(x.dtype)


@style("weights", "helper")
class RotateQueriesAndKeys(nn.Module):
    """lucidrains': the rotary module has ``rotate_queries_or_keys`` and a parameter that may be learnt."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.freqs = nn.Parameter(_frequencies(dim), requires_grad=False)
        self.register_buffer("dummy", torch.tensor(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seq = torch.arange(x.shape[1], device=self.dummy.device, dtype=x.dtype)
        freqs = torch.einsum("..., f -> ... f", seq.type(self.freqs.dtype), self.freqs)
        return freqs.float().repeat_interleave(2, -1).cos().to(x.dtype)


@style("parameters", "buffer of a parameter")
class TablesFromParametersData(nn.Module):
    """A frozen parameter's ``data`` is turned into sines in the constructor, and kept beside it."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(LONGEST, dtype=torch.float32), requires_grad=False)
        phase = torch.outer(self.base.data, _frequencies(dim))
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sin[: x.shape[1]].to(x.dtype)


@style("frozen")
class FrozenFrequenciesTwice(nn.Module):
    """A frozen parameter with each frequency twice."""

    def __init__(self) -> None:
        super().__init__()
        rates = 1.0 / (1e6 ** (torch.arange(0, DIM // 2, 2).float() / (DIM // 2)))
        self.theta = nn.Parameter(torch.cat([rates] * 2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.theta.detach())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("frozen", "complex")
class FrozenPhasors(nn.Module):
    """Complex phases in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        rates = (1 / 1e4) ** torch.linspace(0, 1, DIM // 2, dtype=torch.float32)
        phase = torch.arange(LONGEST).float().unsqueeze(-1) @ rates.unsqueeze(0)
        self.table = nn.Parameter(torch.polar(torch.ones_like(phase), phase), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]]


@style("frozen", "linear", shows="output")
class FrequenciesAsAFrozenLayer(nn.Module):
    """A frozen linear layer multiplies the positions, and another one is trained on the sines."""

    def __init__(self) -> None:
        super().__init__()
        self.B = nn.Linear(1, DIM // 2, bias=False)
        self.B.weight.data = torch.logspace(0, -4, DIM // 2)[:, None]
        self.B.weight.requires_grad_(False)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = self.B(torch.arange(x.shape[1])[:, None].to(self.B.weight.dtype))
        return self.out(torch.cat((phase.sin(), phase.cos()), -1).to(x.dtype))
