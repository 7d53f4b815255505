"""Positions that a parent asks of another method or property of its child, which may have a forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width, rates, turned
from styles.formulas import frequencies as _frequencies
from styles.registry import DIM, LONGEST, style


class Rotates(nn.Module):
    """Gives tables in a method that its forward calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", rates())

    def tables(self, x: torch.Tensor) -> Pair:
        return turned(x, self.rates)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.tables(x)
        return x[..., : DIM // 2] * cos - x[..., DIM // 2 :] * sin


class RefusesItsForward(Rotates):
    """Gives tables in a method alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("call tables")


def _low(x: torch.Tensor, base: float) -> Pair:
    """Tables in the dtype of ``x``."""
    f = base ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
    phase = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), f)
    return phase.cos(), phase.sin()


class KnowsNothing(nn.Module):
    """Makes no positions in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LowTables(KnowsNothing):
    """Gives tables in a method, in the dtype of what that is given."""

    def tables(self, x: torch.Tensor) -> Pair:
        return _low(x, 10000.0)


class StaticTables(KnowsNothing):
    """Gives them in a static method."""

    @staticmethod
    def tables(x: torch.Tensor) -> Pair:
        return _low(x, 10000.0)


class TablesOfTheClass(KnowsNothing):
    """Gives them in a method of the class, with its base."""

    base = 500000.0

    @classmethod
    def tables(cls, x: torch.Tensor) -> Pair:
        return _low(x, cls.base)


class PartOfAMethod(KnowsNothing):
    """Gives them in a part of another method."""

    def _tables(self, base: float, x: torch.Tensor) -> Pair:
        return _low(x, base)

    tables = functools.partialmethod(_tables, 500000.0)


class ByTheTypeOfItsArgument(KnowsNothing):
    """Gives them in a method that is told apart by what it is given."""

    @functools.singledispatchmethod
    def tables(self, x: Any) -> Pair:
        raise TypeError(f"expected a tensor, got {type(x).__name__}")

    @tables.register
    def _(self, x: torch.Tensor) -> Pair:
        return _low(x, 10000.0)


class HandsOnADtype(KnowsNothing):
    """Has one method hand the dtype to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", rates())

    def tables(self, x: torch.Tensor) -> Pair:
        return self.build(x.shape[1], x.dtype)

    def build(self, count: int, dtype: torch.dtype) -> Pair:
        phase = torch.einsum("i,j->ij", torch.arange(count, dtype=dtype), self.rates.to(dtype))
        return phase.cos(), phase.sin()


class GivesOneAfterTheOther(HandsOnADtype):
    """Is asked for a generator of them."""

    def tables(self, x: torch.Tensor) -> Pair:
        cos, sin = self.each(x)
        return cos, sin

    def each(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from turned(x, self.rates)


class RemembersAProperty(HandsOnADtype):
    """Makes a table of all positions when it is first asked."""

    @functools.cached_property
    def table(self) -> Pair:
        phase = torch.outer(torch.arange(LONGEST).type_as(self.rates), self.rates)
        return phase.cos(), phase.sin()

    def tables(self, x: torch.Tensor) -> Pair:
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in self.table)
        return cos, sin


class HasAProperty(nn.Module):
    """Gives tables in a property, for the length that is assigned to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", rates())
        self.length = 0

    @property
    def tables(self) -> Pair:
        phase = torch.outer(torch.arange(self.length).type_as(self.rates), self.rates)
        return phase.cos(), phase.sin()


class AsksForTables(nn.Module):
    """Calls the method of its child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.rotary = child

    def forward(self, x: torch.Tensor) -> Pair:
        tables: Pair = self.rotary.tables(x)
        return tables


@style()
def method_that_forward_calls() -> nn.Module:
    """A method of its child that the child's forward calls, too."""
    return AsksForTables(Rotates())


@style()
def method_without_a_forward() -> nn.Module:
    """A method of a child whose forward raises."""
    return AsksForTables(RefusesItsForward())


@style()
def low_method_beside_forward() -> nn.Module:
    """A method of a child whose forward makes no positions."""
    return AsksForTables(LowTables())


@style()
def static_method_beside_forward() -> nn.Module:
    """A static method of a child."""
    return AsksForTables(StaticTables())


@style()
def class_method_beside_forward() -> nn.Module:
    """A method of a child's class."""
    return AsksForTables(TablesOfTheClass())


@style()
def part_of_a_method_beside_forward() -> nn.Module:
    """A part of a child's method."""
    return AsksForTables(PartOfAMethod())


@style()
def dispatched_method_beside_forward() -> nn.Module:
    """A method of a child that is chosen by the type of its argument."""
    return AsksForTables(ByTheTypeOfItsArgument())


@style()
def method_that_hands_on_a_dtype() -> nn.Module:
    """A method of a child that another one serves."""
    return AsksForTables(HandsOnADtype())


@style()
def generator_beside_forward() -> nn.Module:
    """A method of a child that takes tables from a generator."""
    return AsksForTables(GivesOneAfterTheOther())


@style()
def cached_property_beside_forward() -> nn.Module:
    """A method of a child that reads a cached property."""
    return AsksForTables(RemembersAProperty())


@style()
class AsksForAProperty(nn.Module):
    """Reads a property of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = HasAProperty()

    def forward(self, x: torch.Tensor) -> Pair:
        self.rotary.length = x.shape[1]
        cos, sin = self.rotary.tables
        return cos.to(x.dtype), sin.to(x.dtype)


@style("swapped", inv_freq="rope.inv_freq", exact=half_width)
class AsksByMethod(nn.Module):
    """The parent asks its child by a method that is not forward, and the child has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = NoForward()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope.tables(x.shape[1], x.dtype)


class NoForward(nn.Module):
    """Answers by a method."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def tables(self, length: int, dtype: torch.dtype) -> Pair:
        phase = torch.arange(length, dtype=torch.float32)[:, None] * self.inv_freq[None].float()
        return phase.cos().to(dtype), phase.sin().to(dtype)
