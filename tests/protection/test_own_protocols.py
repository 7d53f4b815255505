"""Classes that say themselves how they are cast, copied and pickled: as correct as without a guard."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.guarded import guarded
from torch import nn

pytestmark = pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")
DIM, LENGTH = 16, 300
POSITIONS = torch.arange(LENGTH)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", None, persistent=False)
        self.build(torch.float32)

    def build(self, dtype: torch.dtype) -> None:
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).double() / DIM)
        self.cos = torch.outer(torch.arange(LENGTH).double(), rates).cos().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cos[POSITIONS]


class MakesItAnewWhereItIsCast(Table):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.build(self.cos.dtype)
        return self


class IsPickledWithoutIt(Table):
    """Its state has no table, and nothing that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = (line for line in "ab")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lines"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lines = (line for line in "ab")
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).double() / DIM)
        self.cos = torch.outer(torch.arange(LENGTH).double(), rates).cos().float()


X = torch.randn(1, LENGTH, DIM // 2, generator=torch.Generator().manual_seed(0))
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("how", ["guard", "protect"])
def test_a_table_is_exact_after_casts_that_make_it_anew(how: str) -> None:
    module, true = guarded(MakesItAnewWhereItIsCast, how), MakesItAnewWhereItIsCast()(X)
    module.bfloat16().float()
    assert module.cos.dtype == torch.float32
    assert torch.equal(module(X), true)
    got, stock = (one.bfloat16()(X.bfloat16()) for one in (module, MakesItAnewWhereItIsCast()))
    assert got.dtype == stock.dtype
    assert (got.double() - true).abs().max() <= (stock.double() - true).abs().max()


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("how", ["guard", "protect"])
def test_a_copy_by_a_class_of_its_own_is_protected_as_well(how: str, way: str) -> None:
    copied = COPIES[way](guarded(IsPickledWithoutIt, how))
    assert torch.equal(copied(X), IsPickledWithoutIt()(X))
    assert list(copied.lines) == ["a", "b"]
    copied.bfloat16().float()
    assert torch.equal(copied(X), IsPickledWithoutIt()(X))
