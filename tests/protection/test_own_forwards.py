"""Forwards that stand in a module itself, are compiled, or have another method do it: exact, or as in stock.

Where they are as in stock that is told of. The truth is float64; dtypes are those of the stock model.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

DIM, LENGTH = 16, 300
RATES = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
X = torch.ones(1, LENGTH, DIM, dtype=torch.bfloat16)
Pair = tuple[torch.Tensor, torch.Tensor]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def waves(rates: torch.Tensor, x: torch.Tensor) -> Pair:
    phase = torch.outer(torch.arange(x.shape[1]).type_as(rates), rates)
    return phase.cos(), phase.sin()


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", RATES.clone(), persistent=False)


def patched(self: Any, x: torch.Tensor) -> Pair:
    return waves(self.inv_freq, x)


class HasAnotherMethod(Frequencies):
    """Chooses its forward when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.native

    def native(self, x: torch.Tensor) -> Pair:
        return waves(self.inv_freq, x)


class CallsWhatItHasChosen(Frequencies):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = {"native": self.native}

    def native(self, x: torch.Tensor) -> Pair:
        return waves(self.inv_freq, x)

    def forward(self, x: torch.Tensor) -> Any:
        return self.chosen["native"](x)


class HasALambda(Frequencies):
    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: waves(self.inv_freq, x)


class IsPatched(Frequencies):
    def __init__(self) -> None:
        super().__init__()
        self.forward = types.MethodType(patched, self)


class HasAPartial(Frequencies):
    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(patched, self)


class IsPatchedLater(Frequencies):
    def forward(self, x: torch.Tensor) -> Pair:
        return waves(self.inv_freq, x)


class HasAMethodDoIt(Frequencies):
    def compute(self, x: torch.Tensor) -> Pair:
        return waves(self.inv_freq, x)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.compute(x)


class IsCompiled(Frequencies):
    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> Pair:
        return waves(self.inv_freq, x)


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.proj, self.rotary = nn.Linear(DIM, DIM), make()

    def forward(self, x: torch.Tensor) -> Any:
        cos, sin = self.rotary(x)
        return self.proj(x * torch.cat((cos, sin), -1)), cos, sin


MODULES = (
    *(HasAnotherMethod, CallsWhatItHasChosen, HasAMethodDoIt, IsCompiled),
    *(HasALambda, IsPatched, HasAPartial, IsPatchedLater),
)
TOLD = (HasALambda, IsPatched, HasAPartial, IsPatchedLater)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_it_is_exact_or_as_in_stock_and_told_of(
    make: type[Frequencies], how: str, graph: bool, recwarn: pytest.WarningsRecorder
) -> None:
    if how == "guard":
        with safe_rope.guard():
            model = Model(make)
    else:
        model = Model(make)
        safe_rope.protect(model)
    if make is IsPatchedLater:
        model.rotary.forward = types.MethodType(patched, model.rotary)
    model.to(torch.bfloat16)
    recwarn.clear()
    run: Callable[..., Any] = torch.compile(model, backend="eager") if graph else model
    for _ in range(2):
        result, cos, sin = run(X)
    assert (result.dtype, cos.dtype, sin.dtype) == (torch.bfloat16,) * 3
    told = any(issubclass(one.category, PrecisionWarning) for one in recwarn)
    assert told == (make in TOLD)
    phase = torch.outer(torch.arange(LENGTH).double(), RATES.double())
    is_exact = all(
        bool(((found.double() - true).abs() < 2.0**-8).all())
        for found, true in ((cos, phase.cos()), (sin, phase.sin()))
    )
    assert is_exact or told
