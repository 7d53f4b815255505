"""What a forward assigns, deletes or keeps of itself is in the module afterwards as in the stock model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

DIM = 16
X = torch.ones(1, 200, DIM)
BESIDE = SimpleNamespace(real=None)
"""Where somebody beside the module finds it: no stand-in does."""


class StopError(Exception):
    """Ends a forward in the middle."""


class Attends(nn.Module):
    """Has frequencies and weights."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        self.register_buffer("inv_freq", rates, persistent=False)
        self.register_buffer("state", torch.zeros(3), persistent=False)
        phases = torch.arange(200.0)[:, None] * rates
        self.first, self.calls, self.mark = True, 0, 0
        self.tables = {"cos": phases.cos(), "count": 1, "old": 1}
        self.pair = (phases.sin(), 1)
        self.proj = nn.Linear(DIM, DIM)

    def change(self) -> None:
        """Change something of itself."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        phases = torch.arange(x.shape[1]).type_as(self.inv_freq)[:, None] * self.inv_freq
        tables = torch.cat((phases.cos(), self.pair[0]), -1) + self.tables["cos"].repeat(1, 2)
        return self.calls + self.training + self.proj(x * tables.to(x.dtype))

    def forward(self, x: torch.Tensor) -> Any:
        result = self.compute(x)
        self.change()
        return result


class Deletes(Attends):
    def change(self) -> None:
        if hasattr(self, "first"):
            del self.first, self.state, self.tables["old"]
            self.calls += 1


class Renames(Attends):
    def change(self) -> None:
        if hasattr(self, "first"):
            self.second = vars(self).pop("first")
            self.tables["new"] = self.tables.pop("old")


class Replaces(Attends):
    def change(self) -> None:
        self.pair = (self.pair[0], self.pair[1] + 1)
        self.tables = {**self.tables, "count": self.pair[1]}


class IsLeftInTheMiddle(Attends):
    def change(self) -> None:
        self.calls += 1
        self.state, self.mark = self.state + 1, self.calls
        self.tables["count"] = self.calls
        raise StopError


class IsWrittenToBeside(Attends):
    """Has somebody else write to it while it runs."""

    def change(self) -> None:
        real: Any = BESIDE.real
        real.calls, real.mark, real.tables["count"] = 7, 7, 7
        real.state = torch.full((3,), 7.0)


def held(module: Any) -> Any:
    names = ("first", "second", "calls", "mark")
    numbers = {name: getattr(module, name) for name in names if hasattr(module, name)}
    entries = {key: value for key, value in module.tables.items() if key != "cos"}
    return numbers, entries, module.pair[1], [name for name in module._buffers if name != "inv_freq"]


def run(model: Any, x: torch.Tensor) -> Any:
    BESIDE.real = model
    with torch.no_grad():
        try:
            return model(x)
        except StopError:
            return torch.zeros(())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [Deletes, Renames, Replaces, IsLeftInTheMiddle, IsWrittenToBeside])
def test_a_forward_changes_what_it_changes_in_stock(make: Any, dtype: torch.dtype) -> None:
    with safe_rope.guard():
        model = make()
    stock = make()
    stock.load_state_dict(model.state_dict())
    for _ in range(3):
        results = [run(one.to(dtype), X.to(dtype)) for one in (model, stock)]
        assert torch.equal(*results)
        assert held(model) == held(stock)
        assert model.state_dict().keys() == stock.state_dict().keys()
        if "state" in stock._buffers:
            assert torch.equal(model.state, stock.state)


class Chooses(Attends):
    """Chooses what computes at its first call."""

    chosen: Any = None

    def __init__(self, choose: Callable[[Any], Any]) -> None:
        super().__init__()
        self.choose, self.kept = choose, dict[str, Any]()

    def forward(self, x: torch.Tensor) -> Any:
        if self.chosen is None:
            self.chosen = self.choose(self)
        return self.chosen(x)


class Inside:
    """Has the module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> Any:
        return self.module.compute(x)


def _in_a_dictionary(module: Any) -> Any:
    module.kept["compute"] = module.compute
    return functools.partial(_from_a_dictionary, module.kept)


def _from_a_dictionary(kept: Any, x: torch.Tensor) -> Any:
    return kept["compute"](x)


class InASlot:
    """Has the module, and no dictionary."""

    __slots__ = ("module",)

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> Any:
        return self.module.compute(x)


def _by_default(module: Any) -> Any:
    def compute(x: torch.Tensor, of: Any = module, *, other: Any = module) -> Any:
        return other.compute(of.compute(x))

    return compute


def _in_a_set(module: Any) -> Any:
    module.kept["compute"] = {module.compute}
    return functools.partial(_from_a_set, module.kept)


def _from_a_set(kept: Any, x: torch.Tensor) -> Any:
    (compute,) = kept["compute"]
    return compute(x)


def _weakly(module: Any) -> Any:
    module.kept["compute"] = weakref.WeakMethod(module.compute)
    return functools.partial(_from_a_weak_method, module.kept)


def _from_a_weak_method(kept: Any, x: torch.Tensor) -> Any:
    return kept["compute"]()(x)


def _by_a_hook(module: Any) -> Any:
    module.register_forward_hook(lambda _, args, result: module.compute(*args))
    return torch.clone


CHOICES = {
    "method": lambda module: module.compute,
    "partial": lambda module: functools.partial(module.compute),
    "closure": lambda module: lambda x: module.compute(x),
    "object": Inside,
    "dictionary": _in_a_dictionary,
    "slot": InASlot,
    "default": _by_default,
    "set": _in_a_set,
    "weak method": _weakly,
    "hook": _by_a_hook,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("choice", CHOICES)
def test_what_a_forward_has_chosen_is_of_the_module(choice: str, dtype: torch.dtype) -> None:
    with safe_rope.guard():
        model: Any = Chooses(CHOICES[choice])
    stock: Any = Chooses(CHOICES[choice])
    stock.load_state_dict(model.state_dict())
    for change in ("train", "eval", "count", "frequencies", "in place"):
        for one in (model.to(dtype), stock.to(dtype)):
            if change in ("train", "eval"):
                getattr(one, change)()
            elif change == "count":
                one.calls = 3
            elif change == "frequencies":
                one.inv_freq = one.inv_freq * 0.5
            else:
                one.inv_freq.mul_(0.5)
        assert torch.equal(run(model, X.to(dtype)), run(stock, X.to(dtype)))
