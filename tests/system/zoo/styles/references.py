"""Modules that what they hold leads back to: a hook, a bound method, a closure, an object, a child."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, rates, turned
from styles.registry import DIM, style


def _turned(count: int, rates: torch.Tensor) -> torch.Tensor:
    phase = torch.outer(torch.arange(count).type_as(rates), rates)
    return torch.cat((phase.cos(), phase.sin()), -1)


@style()
class HooksAChild(nn.Module):
    """A hook of a child assigns what forward returns, in the dtype of what the child gives."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("inv_freq", rates(), persistent=False)
        self.proj.register_forward_hook(self._rotate)

    def _rotate(self, _: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        count = torch.arange(output.shape[1], device=output.device, dtype=output.dtype)
        phase = torch.outer(count, self.inv_freq.to(output.dtype))
        self.last = phase.cos(), phase.sin()

    def forward(self, x: torch.Tensor) -> Pair:
        self.proj(x)
        return self.last


class KnowsItsParent(nn.Module):
    """Returns what its parent has made for this call."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self.parent().current
        return table.to(x.dtype)


@style()
class ReadByAChildThatKnowsIt(nn.Module):
    """Assigns a table that a child reads through a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        self.child = KnowsItsParent(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.current = _turned(x.shape[1], self.inv_freq)
        return self.child(x)  # type: ignore[no-any-return]


@style()
class GrowsByABoundMethod(nn.Module):
    """Chooses in its constructor which of its methods makes the table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        self.build, self.length = self._build, 0

    def _build(self, length: int) -> None:
        self.kept, self.length = _turned(length, self.inv_freq), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.length:
            self.build(x.shape[1])
        return self.kept[: x.shape[1]].to(x.dtype)


@style()
class FilledByAClosure(nn.Module):
    """A function of the constructor assigns the table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)

        def build(length: int) -> None:
            self.kept = _turned(length, self.inv_freq)

        self.build = build

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.build(x.shape[1])
        return self.kept.to(x.dtype)


class Strategy:
    """Does the work of the module that it has."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def build(self, length: int) -> None:
        self.module.kept = _turned(length, self.module.inv_freq)


@style()
class FilledByAnObject(nn.Module):
    """An object that has the module assigns the table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        self.strategy = Strategy(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.strategy.build(x.shape[1])
        return self.kept.to(x.dtype)


_BY_NAME: dict[str, nn.Module] = {}


@style(reset=_BY_NAME.clear)
class InAGlobalRegistry(nn.Module):
    """Enters itself in a global dictionary when it is built, and takes what it needs from there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        _BY_NAME["rope"] = self

    def forward(self, x: torch.Tensor) -> Pair:
        one: Any = _BY_NAME["rope"]
        self.is_entered = one is self
        return turned(x, one.inv_freq)


class ComparesByItsBase(nn.Module):
    """Equals any module of its base; cannot be compared or hashed before it has one."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("inv_freq", rates(base))

    def __eq__(self, other: object) -> bool:
        return self.base == other.base  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.base)

    def forward(self, x: torch.Tensor) -> Pair:
        return turned(x, self.inv_freq)


@style()
class EqualModules(nn.Module):
    """Has two children that are equal, and one that differs from them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = ComparesByItsBase(10000.0), ComparesByItsBase(500000.0)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.first(x)[0], self.last(x)[1]
