"""Styles of an eighth look, drawn from a grammar: tables that their owner counts and something else holds."""

from __future__ import annotations

import functools
import math
from collections import namedtuple

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def _turned_halves(x: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    cos, sin = (torch.cat((part, part), -1).to(x.dtype) for part in (phase.cos(), phase.sin()))
    return x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin


def _turned_pairs(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cis).flatten(-2).type_as(x)


class Holder(nn.Module):
    """Holds what it is given, and has no forward."""

    def __init__(self, rates: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("rates", rates)


@style("given", shows="output", inputs=hidden_and_positions)
class FrequenciesGivenToAHolder(nn.Module):
    """The frequencies are in a module of its own, whose constructor gets them."""

    def __init__(self, dim: int = DIM, base: float = 500000.0) -> None:
        super().__init__()
        self.holder = Holder(1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)))
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        phase = torch.multiply(position_ids[0].reshape(-1, 1), self.holder.rates)
        return _turned_halves(self.proj(x), phase)


class Phasors(nn.Module):
    """Holds pairs of cosine and sine, [length, dim / 2, 2]."""

    def __init__(self, sincos: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("sincos", sincos)

    def forward(self) -> torch.Tensor:
        return self.sincos


@style("given", shows="output")
class PairsGivenToAHolder(nn.Module):
    """Complex phases as pairs of real numbers, in a module that gets them."""

    def __init__(self, dim: int = DIM, base: float = 1e6) -> None:
        super().__init__()
        inv_freq = base ** -(torch.arange(0, dim, 2, dtype=torch.float) / dim)
        phase = torch.arange(LONGEST, dtype=inv_freq.dtype).reshape(-1, 1) * inv_freq
        self.holder = Phasors(torch.view_as_real(torch.polar(torch.ones_like(phase), phase)))
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cis = torch.view_as_complex(self.holder()[: x.shape[1]].float().contiguous())
        return _turned_pairs(self.proj(x), cis)


@style("given", "complex", shows="output")
class PhasorsInABareModule(nn.Module):
    """Complex phases in a buffer of a bare ``nn.Module()``."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = nn.Module()
        self.holder.register_buffer("cis", self._phasors(DIM, 10000.0), persistent=False)

    def _phasors(self, dim: int, base: float) -> torch.Tensor:
        rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(base) / dim))
        phase = torch.outer(torch.tensor(list(range(LONGEST))).float(), rates)
        return torch.polar(torch.ones_like(phase), phase)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _turned_pairs(x, self.holder.cis.index_select(0, torch.arange(x.shape[1])))


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


class Slotted:
    """Holds frequencies in a slot."""

    __slots__ = ("inv_freq",)

    def __init__(self, inv_freq: torch.Tensor) -> None:
        self.inv_freq = inv_freq


@style("object", inputs=hidden_and_positions, exact=half_width, inv_freq="store.inv_freq")
class FrequenciesInASlot(nn.Module):
    """An object with slots holds the frequencies, and the first call asks what it returns."""

    def __init__(self, dim: int = DIM, base: float = 500000.0) -> None:
        super().__init__()
        self.store = Slotted(1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        phase = torch.einsum("...i,j->...ij", position_ids[0].float(), self.store.inv_freq)
        return phase.cos().type_as(x), phase.sin().type_as(x)


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


@style("attribute", "complex", inputs=hidden_and_positions)
class PhasorsOfAnAttribute(nn.Module):
    """An attribute, which no loader fills on meta, and its complex exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self._inv = torch.pow(1e4, -torch.arange(0, DIM, 2) / DIM)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.exp(1j * (self._inv * position_ids.squeeze(0).type_as(self._inv)[:, None]))


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


class GivenByItsSubclass(nn.Module):
    """Registers what its subclass has computed."""

    def __init__(self, rates: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("rates", rates, persistent=False)


class Settings:
    """A config."""

    head_dim, rope_theta = DIM, 500000.0


@style("inheritance")
class ComputedBeforeItsBase(GivenByItsSubclass):
    """Binds its argument anew and computes before the constructor of its base runs."""

    def __init__(self, config: type[Settings] | Settings | None = None) -> None:
        config = config or Settings()
        dim = config.head_dim
        super().__init__(1.0 / torch.logspace(0, (dim - 2) / dim, dim // 2, base=config.rope_theta))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).float()[:, None] * self.rates
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


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


@style("buffer")
class ProductOfALiteralAndACount(nn.Module):
    """A matrix product, which mixes no dtypes, of one factor with a dtype and one without."""

    def __init__(self) -> None:
        super().__init__()
        rates = torch.tensor([10000 ** (-i / DIM) for i in range(0, DIM, 2)])
        phase = torch.matmul(torch.arange(LONGEST, dtype=torch.float32).view(-1, 1), rates.view(1, -1))
        self.register_buffer("cos", torch.cat((phase, phase), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((phase, phase), -1).sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


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
