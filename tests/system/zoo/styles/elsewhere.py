"""Positions that are made elsewhere than in a constructor and a forward, or in two modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, rates
from styles.registry import DIM, style


class HasNoForward(nn.Module):
    """Computes all of it, in the dtype of what it is given, in a method of another name."""

    def tables(self, x: torch.Tensor) -> Pair:
        f = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
        phase = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), f)
        return phase.cos(), phase.sin()


@style()
class CallsAnotherMethod(nn.Module):
    """Calls a method of its child that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = HasNoForward()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rotary.tables(x)


class HasPhasors(nn.Module):
    """Gives phases in complex numbers, in a method of another name."""

    def phases(self, x: torch.Tensor) -> torch.Tensor:
        f = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
        phase = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), f).float()
        return torch.view_as_real(torch.exp(1j * phase)).to(x.dtype)


@style()
class CallsForPhasors(nn.Module):
    """Calls a method of its child that takes exponentials of imaginary numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = HasPhasors()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotary.phases(x)


@style()
class IsItsCall(nn.Module):
    """Has ``__call__`` in place of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)

    def __call__(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class Phases(nn.Module):
    """Counts and multiplies; says in which dtype sines are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("f", 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return torch.arange(x.shape[1]).to(self.f)[:, None] * self.f, x.dtype


class Sines(nn.Module):
    """Takes sines of what another module has counted."""

    def forward(self, given: tuple[torch.Tensor, torch.dtype]) -> Pair:
        phases, dtype = given
        return phases.cos().to(dtype), phases.sin().to(dtype)


@style()
def phases_and_sines_in_a_sequence() -> nn.Module:
    """Hands phases from one module of a sequence to the next."""
    return nn.Sequential(Phases(), Sines())


class Turns(nn.Module):
    """Turns by what it is given, which has no name."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", w)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).view(-1, 1).mul(self.w)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style()
def given_by_a_factory() -> nn.Module:
    """Has frequencies that are no part of any constructor."""
    return Turns(rates())


@style()
def copied_and_filled() -> nn.Module:
    """Is a copy of a module that has ended, filled afterwards."""
    copied = copy.deepcopy(Turns(torch.ones(DIM // 2)))
    copied.w.copy_(rates())
    return copied


@style()
class MadeByAHook(nn.Module):
    """A hook makes what forward returns, before anything of forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(MadeByAHook._make)

    @staticmethod
    def _make(module: Any, inputs: Any) -> None:
        x = inputs[0]
        f = 10000.0 ** (-torch.arange(0, DIM, 2).to(x.dtype) / DIM)
        phase = torch.arange(x.shape[1]).to(x.dtype)[:, None] * f
        module.tables = phase.cos(), phase.sin()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.tables


@style()
class PhasorsOfAHook(MadeByAHook):
    """A hook makes phases in complex numbers, before anything of forward runs."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_forward_pre_hook(PhasorsOfAHook._phases)

    @staticmethod
    def _phases(module: Any, inputs: Any) -> None:
        x = inputs[0]
        f = 10000.0 ** (-torch.arange(0, DIM, 2).to(x.dtype) / DIM)
        phase = torch.arange(x.shape[1]).to(x.dtype)[:, None] * f
        module.tables = torch.view_as_real(torch.exp(1j * phase.float())).to(x.dtype).unbind(-1)
