"""Frequencies that something else has than what turns them: a mere holder, an object, a closure."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_halves as _turned_halves
from styles.formulas import turned_pairs as _turned_pairs
from styles.registry import DIM, LONGEST, hidden_and_positions, style


class Rates(nn.Module):
    """Holds what it is given, under a name that says nothing."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", w)


@style("given", inputs=hidden_and_positions)
class PositionsInTheDtypeOfHeldFrequencies(nn.Module):
    """Counts nothing: the positions come in, and get the dtype of the frequencies."""

    def __init__(self, dim: int = DIM, base: float = 500000.0) -> None:
        super().__init__()
        self.holder = Rates(torch.exp(torch.arange(0, dim, 2) * (-math.log(base) / dim)))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        rates = self.holder.w
        phase = torch.einsum("i,j->ij", position_ids.squeeze(0).type_as(rates), rates)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("given")
class CountsInTheDtypeOfHeldFrequencies(nn.Module):
    """Counts integers, and gives them the dtype of the frequencies; not every dimension turns."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        rates = base ** -(torch.arange(0, dim // 2, 2).float() / dim)
        self.holder = Rates(torch.cat((rates, torch.zeros(dim // 4))))

    def forward(self, x: torch.Tensor) -> Pair:
        rates = self.holder.w.to(x.device)
        phase = torch.arange(x.shape[1]).type_as(rates).view(-1, 1) @ rates.view(1, -1)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def _turned(count: int, rates: torch.Tensor) -> Pair:
    phase = torch.arange(count).type_as(rates)[:, None] * rates
    return phase.cos(), phase.sin()


class HandsOut(nn.Module):
    """Has a forward that computes nothing."""

    def __init__(self, rates: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates, persistent=False)
        self.register_buffer("w", rates)

    def forward(self, known: bool) -> torch.Tensor:
        return (self.inv_freq if known else self.w).expand(DIM // 2)


@style("given")
class FrequenciesHandedOut(nn.Module):
    """Frequencies of either name are what a forward returns; a function beside the class turns them."""

    def __init__(self, dim: int = DIM, base: float = 500000.0) -> None:
        super().__init__()
        self.rope = HandsOut(base ** -(torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tables = (*_turned(x.shape[1], self.rope(True)), *_turned(x.shape[1], self.rope(False)))
        return tuple(table.to(x.dtype) for table in tables)


class Lookup:
    """An object that is called, and remembers what it made last."""

    def __init__(self, rates: torch.Tensor) -> None:
        self.rates, self.longest = rates, torch.empty(0)

    def __call__(self, count: int) -> Pair:
        if len(self.longest) < count:
            self.longest = torch.arange(count).float().unsqueeze(-1) @ self.rates.unsqueeze(0)
        return self.longest[:count].cos(), self.longest[:count].sin()


@style("object")
class FrequenciesInAnObjectThatIsCalled(nn.Module):
    """Autocast would lower a product that the object's own method takes."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.lookup = Lookup(1.0 / torch.logspace(0, (dim - 2) / dim, dim // 2, base=base))

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.lookup(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


def _lookup(rates: torch.Tensor) -> Callable[[int], Pair]:
    known: dict[int, Pair] = {}

    def look_up(count: int) -> Pair:
        if count not in known:
            known[count] = _turned(count, rates)
        return known[count]

    return look_up


@style("closure")
class FrequenciesInAClosure(nn.Module):
    """A function that a helper of the constructor returns has the frequencies, of numbers in a list."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.look_up = _lookup(torch.tensor([base ** (-i / dim) for i in range(0, dim, 2)]))

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.look_up(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


@style("lazy", "unharmed")
class PhasorsRememberedByAMethod(nn.Module):
    """A method that remembers takes a matrix product, which autocast would lower, and makes phasors."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    @functools.lru_cache(maxsize=4)  # noqa: B019 - as users write it
    def phasors(self, count: int) -> torch.Tensor:
        rates = 1.0 / (10000 ** (torch.arange(0, self.dim, 2).float() / self.dim))
        phase = (torch.ones(count).cumsum(0) - 1).unsqueeze(-1) @ rates.unsqueeze(0)
        return torch.polar(torch.ones_like(phase), phase)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.phasors(x.shape[1])


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


class _Owner:
    """An object that is no module, and holds the tables of all."""

    def __init__(self, dim: int = DIM) -> None:
        phases = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.cos, self.sin = phases.cos(), phases.sin()


@style("owner")
class ByAWeakReference(nn.Module):
    """The tables are another object's, which is held weakly beside."""

    def __init__(self) -> None:
        super().__init__()
        self.owners = [_Owner()]
        self.owner = weakref.ref(self.owners[0])

    def forward(self, x: torch.Tensor) -> Pair:
        owner: Any = self.owner()
        return owner.cos[: x.shape[1]].to(x.dtype), owner.sin[: x.shape[1]].to(x.dtype)
