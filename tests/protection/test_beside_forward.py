"""Methods and properties that make positions besides a forward: asked of a module, of its class, replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

LENGTH, DIM = 300, 16
X = torch.zeros(1, LENGTH, DIM, dtype=torch.bfloat16)


class Tables(nn.Module):
    """Gives tables in a method, a static method and a property; its forward knows nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))

    def tables(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).type_as(self.rates), self.rates).sin().to(x.dtype)

    @staticmethod
    def low(x: torch.Tensor) -> torch.Tensor:
        rates = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
        return torch.outer(torch.arange(x.shape[1], dtype=x.dtype), rates).sin()

    @property
    def all(self) -> torch.Tensor:
        return torch.outer(torch.arange(LENGTH).type_as(self.rates), self.rates).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


TRUE = Tables().all.bfloat16()


def guarded() -> Any:
    with safe_rope.guard():
        return Tables().bfloat16()


@pytest.mark.parametrize("copied", [False, True])
def test_a_module_gives_the_true_ones_rounded_once(copied: bool) -> None:
    module = copy.deepcopy(guarded()) if copied else guarded()
    stock = Tables().bfloat16()
    for ask in (lambda m: m.tables(X), lambda m: m.low(X), lambda m: m.all):
        assert torch.equal(ask(module), TRUE)
        assert not torch.equal(ask(stock), TRUE)


def test_the_class_is_asked_as_in_stock() -> None:
    module = guarded()
    assert torch.equal(type(module).low(X), Tables.low(X))
    assert torch.equal(Tables.low(X), Tables().bfloat16().low(X))


def test_a_method_that_somebody_replaces_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = guarded()
    monkeypatch.setattr(Tables, "tables", lambda self, x: self.rates.double())
    assert torch.equal(module.tables(X), Tables().rates.double())


def test_an_error_of_a_method_is_its_own_and_leaves_nothing_behind() -> None:
    module = guarded()
    with pytest.raises(AttributeError, match="shape"):
        module.tables(None)
    assert torch.equal(module.tables(X), TRUE)


class Asks(nn.Module):
    """Asks a child for tables in the dtype of what it is given, by a method and by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.counts = Tables(), Counts()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tables.low(x), self.counts(x.shape[1], x.dtype)


class Counts(nn.Module):
    """Counts in the dtype that it is given."""

    def forward(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        rates = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=dtype) / DIM)
        return torch.outer(torch.arange(count, dtype=dtype), rates).sin()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_computed_in_a_low_dtype_is_rounded_once_in_a_graph_too(compiled: bool) -> None:
    with safe_rope.guard():
        model: Any = Asks().bfloat16()
    ask = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for one in ask(X):
        assert torch.equal(one, TRUE)
