"""What a forward does besides its tables happens once a call, eagerly and in graphs of torch.compile.

Each module takes its positions from something that its call moves on: a counter, an iterator, a global,
random numbers. The truth is the FP32 module without the library.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import importlib
import itertools
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn

import safe_rope
from safe_rope._base.effects import acts

DIM, LENGTH, CALLS = 16, 5, 3
FAR = 300
"""Positions that BF16 does not count."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Counter:
    """Moves on whenever it is asked."""

    def __init__(self) -> None:
        self.position = FAR

    def advance(self, count: int) -> int:
        before = self.position
        self.position += count
        return before

    def __call__(self, count: int) -> int:
        return self.advance(count)

    @property
    def next(self) -> int:
        return self.advance(LENGTH)


class OnAClass:
    """Counts on the class."""

    position = FAR

    @classmethod
    def advance(cls, count: int) -> int:
        cls.position += count
        return cls.position


class Rotary(nn.Module):
    """Counts from a first position on."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        self.register_buffer("inv_freq", rates, persistent=False)
        self.kept = kept

    def waves(self, count: int, first: Any) -> tuple[torch.Tensor, torch.Tensor]:
        phase = torch.outer((torch.arange(count) + first).type_as(self.inv_freq), self.inv_freq)
        return phase.cos(), phase.sin()


COUNTER, PLACE, NUMBERS, ON_A_THREAD = Counter(), FAR, np.array([FAR]), threading.local()
ITERATOR: Any = itertools.count(FAR, LENGTH)
TENSOR, QUEUE, TALLY = torch.tensor(FAR), collections.deque[int](), collections.Counter[str]()
DRAWN, IN_A_CONTEXT = torch.Generator(), contextvars.ContextVar("position", default=FAR)
FILE = types.SimpleNamespace(positions=[FAR])


def reset() -> None:
    """Put back what the modules move on."""
    global PLACE, ITERATOR
    COUNTER.position, PLACE, NUMBERS[0], ON_A_THREAD.place = FAR, FAR, FAR, FAR
    ITERATOR, OnAClass.position, FILE.positions = itertools.count(FAR, LENGTH), FAR, [FAR]
    QUEUE.clear()
    QUEUE.extend(range(FAR, 2 * FAR, LENGTH))
    TALLY.clear()
    TENSOR.fill_(FAR)
    DRAWN.manual_seed(4)
    IN_A_CONTEXT.set(FAR)
    os.environ["SAFE_ROPE_TEST_PLACE"] = str(FAR)
    random.seed(5)
    torch.manual_seed(6)
    DefaultsMoveOn.forward.__defaults__[0][0] = FAR  # type: ignore[index]


class HoldsACounter(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], self.kept.advance(x.shape[1]))


class HoldsItInAList(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], self.kept[0].advance(x.shape[1]))


class CallsWhatItHolds(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], self.kept(x.shape[1]))


class TakesTheNext(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], next(self.kept))


class TakesTheFirst(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], self.kept.popleft())


class MovesWhatItHoldsByAnotherName(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        kept = self.kept
        kept["place"] += x.shape[1]
        return self.waves(x.shape[1], kept["place"])


class MovesItsTensorByAnotherName(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        kept = self.kept
        kept += x.shape[1]
        return self.waves(x.shape[1], kept)


def move_on(place: torch.Tensor, count: int) -> None:
    place.add_(count)


class HasAHelperMoveItsTensor(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        move_on(self.kept, x.shape[1])
        return self.waves(x.shape[1], self.kept)


class AddsIntoItsTensor(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        torch.add(self.kept, x.shape[1], out=self.kept)
        return self.waves(x.shape[1], self.kept)


class AsksAGlobalObject(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], COUNTER.advance(x.shape[1]))


class ReadsAGlobalProperty(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], COUNTER.next)


class AsksAClass(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], OnAClass.advance(x.shape[1]))


class TakesTheNextOfAGlobal(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], next(ITERATOR))


class TakesTheFirstOfAGlobal(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], QUEUE.popleft())


class AssignsAGlobal(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        global PLACE
        PLACE += x.shape[1]
        return self.waves(x.shape[1], PLACE)


class Tallies(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        TALLY["place"] += x.shape[1]
        return self.waves(x.shape[1], FAR + TALLY["place"])


class MovesAGlobalTensor(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        TENSOR.add_(x.shape[1])
        return self.waves(x.shape[1], TENSOR.clone())


class AppendsInANamespace(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        FILE.positions.append(FILE.positions[-1] + x.shape[1])
        return self.waves(x.shape[1], FILE.positions[-1])


class MovesAContextVariable(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        IN_A_CONTEXT.set(IN_A_CONTEXT.get() + x.shape[1])
        return self.waves(x.shape[1], IN_A_CONTEXT.get())


class MovesWhatItsThreadHas(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        ON_A_THREAD.place += x.shape[1]
        return self.waves(x.shape[1], ON_A_THREAD.place)


class MovesTheEnvironment(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        place = int(os.environ["SAFE_ROPE_TEST_PLACE"]) + x.shape[1]
        os.environ["SAFE_ROPE_TEST_PLACE"] = str(place)
        return self.waves(x.shape[1], place)


class DefaultsMoveOn(Rotary):
    def forward(self, x: torch.Tensor, place: list[int] = [FAR]) -> Any:  # noqa: B006 - what it is about
        place[0] += x.shape[1]
        return self.waves(x.shape[1], place[0])


class Draws(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], torch.randint(0, 1000, (1,)))


class DrawsFromAGlobal(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], int(torch.randint(0, 1000, (1,), generator=DRAWN)))


class DrawsFromPython(Rotary):
    def forward(self, x: torch.Tensor) -> Any:
        return self.waves(x.shape[1], random.randint(0, 1000))


def with_an_outer_variable() -> nn.Module:
    place = FAR

    class AssignsAnOuterVariable(Rotary):
        def forward(self, x: torch.Tensor) -> Any:
            nonlocal place
            place += x.shape[1]
            return self.waves(x.shape[1], place)

    return AssignsAnOuterVariable()


def closure() -> Callable[[int], int]:
    place = [FAR]

    def advance(count: int) -> int:
        place[0] += count
        return place[0]

    return advance


def with_a_closure() -> nn.Module:
    advance = closure()

    class CallsAClosure(Rotary):
        def forward(self, x: torch.Tensor) -> Any:
            return self.waves(x.shape[1], advance(x.shape[1]))

    return CallsAClosure()


class IsGivenACounter(Rotary):
    def forward(self, x: torch.Tensor, counter: Counter) -> Any:
        return self.waves(x.shape[1], counter.advance(x.shape[1]))


class IsGivenADictionary(Rotary):
    def forward(self, x: torch.Tensor, cache: dict[str, int]) -> Any:
        first = cache.get("seen", FAR)
        cache["seen"] = first + x.shape[1]
        return self.waves(x.shape[1], first)


class IsGivenAList(Rotary):
    def forward(self, x: torch.Tensor, cache: list[int]) -> Any:
        first = FAR + len(cache)
        cache.extend([0] * x.shape[1])
        return self.waves(x.shape[1], first)


class IsGivenATensor(Rotary):
    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> Any:
        first = seen + FAR
        seen += x.shape[1]
        return self.waves(x.shape[1], first)


class KeepsWhatItIsGiven(Rotary):
    """Changes itself, too; another module reads what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.seen = FAR

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> Any:
        self.last, first = x, self.seen
        self.seen += x.shape[1]
        seen += x.shape[1]
        return self.waves(x.shape[1], first)


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.proj, self.rotary = nn.Linear(DIM, DIM), make()

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.rotary(x, *more)


HOLDS: dict[Callable[..., nn.Module], Callable[[], Any]] = {
    HoldsACounter: Counter,
    HoldsItInAList: lambda: [Counter()],
    CallsWhatItHolds: Counter,
    TakesTheNext: lambda: itertools.count(FAR, LENGTH),
    TakesTheFirst: lambda: collections.deque(range(FAR, 2 * FAR, LENGTH)),
    MovesWhatItHoldsByAnotherName: lambda: {"place": FAR},
    MovesItsTensorByAnotherName: lambda: torch.tensor(FAR),
    HasAHelperMoveItsTensor: lambda: torch.tensor(FAR),
    AddsIntoItsTensor: lambda: torch.tensor(FAR),
}
GIVEN: dict[Callable[..., nn.Module], Callable[[], Any]] = {
    IsGivenACounter: Counter,
    IsGivenADictionary: dict,
    IsGivenAList: list,
    IsGivenATensor: lambda: torch.zeros((), dtype=torch.int64),
    KeepsWhatItIsGiven: lambda: torch.zeros((), dtype=torch.int64),
}
ALONE: tuple[Callable[..., nn.Module], ...] = (
    *(AsksAGlobalObject, ReadsAGlobalProperty, AsksAClass, TakesTheNextOfAGlobal, TakesTheFirstOfAGlobal),
    *(AssignsAGlobal, Tallies, MovesAGlobalTensor, AppendsInANamespace, MovesAContextVariable),
    *(MovesWhatItsThreadHas, MovesTheEnvironment, DefaultsMoveOn, Draws, DrawsFromAGlobal, DrawsFromPython),
    *(with_an_outer_variable, with_a_closure),
)
CASES = (*HOLDS, *GIVEN, *ALONE)
AS_STOCK = (IsGivenADictionary, IsGivenAList)
"""In graphs: what a container that is given is filled with cannot be told from tables."""


def called(
    make: Callable[..., nn.Module], *, guarded: bool, graph: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[torch.Tensor], list[Any], Model]:
    """Results of all calls: of the FP32 model as it is, or of the guarded one after a cast."""
    reset()
    hold = HOLDS.get(make)
    with safe_rope.guard() if guarded else contextlib.nullcontext():
        model = Model(make if hold is None else lambda: make(hold()))
    model.to(dtype)
    run: Callable[..., Any] = torch.compile(model, backend="eager") if graph else model
    x = torch.ones(1, LENGTH, DIM, dtype=dtype)
    given = [GIVEN[make]()] if make in GIVEN else []
    torch.manual_seed(3)
    return [table for _ in range(CALLS) for table in run(x, *given)], given, model


def _as_values(given: Any) -> Any:
    return vars(given) if isinstance(given, Counter) else given


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore::safe_rope.PrecisionWarning")
def test_a_call_counts_once(make: Callable[..., nn.Module], graph: bool) -> None:
    as_stock = graph and make in AS_STOCK
    dtype = torch.bfloat16 if as_stock else torch.float32
    true, expected, _ = called(make, guarded=False, graph=False, dtype=dtype)
    found, given, model = called(make, guarded=True, graph=graph)
    assert {table.dtype for table in found} == {torch.bfloat16}
    for table, other in zip(found, true, strict=True):
        torch.testing.assert_close(table.float(), other.float(), rtol=0, atol=0 if as_stock else 2.0**-8)
    assert list(map(_as_values, given)) == list(map(_as_values, expected))
    if isinstance(model.rotary, KeepsWhatItIsGiven):
        assert model.rotary.last.dtype == torch.bfloat16


class OnlyCounts(Rotary):
    """Makes tables, a list of its own and a copy."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        made = []
        for part in self.waves(x.shape[1], 0):
            made.append(part.unsqueeze(0).to(x.dtype))
        cos, sin = made
        cos *= 1.5
        return cos, sin.contiguous()


def test_what_is_known_to_do_nothing_besides_may_be_asked_twice() -> None:
    assert not acts(OnlyCounts)
    assert all(acts(make) for make in (*HOLDS, *ALONE) if isinstance(make, type))


ELSEWHERE = """
place = 300
def move(count):
    global place
    place += count
    return place - count
"""
USING_IT = """
import moves_elsewhere
import torch
from torch import nn
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 16, 2).float() / 16), persistent=False)
    def forward(self, x):
        positions = torch.arange(x.shape[1]) + moves_elsewhere.move(x.shape[1])
        phase = torch.outer(positions.type_as(self.inv_freq), self.inv_freq)
        return phase.cos(), phase.sin()
"""


@pytest.mark.contract
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.filterwarnings("ignore::safe_rope.PrecisionWarning")
def test_a_function_of_another_package_is_called_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    for name, source in (("moves_elsewhere", ELSEWHERE), ("asks_elsewhere", USING_IT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / name)
    moved = importlib.import_module("moves_elsewhere")
    x = torch.ones(1, LENGTH, DIM, dtype=torch.bfloat16)
    try:
        rotary = importlib.import_module("asks_elsewhere").Rotary
        true = rotary()(x)
        moved.place = FAR
        with safe_rope.guard():
            model = Model(rotary)
        model.to(torch.bfloat16)
        for calls in range(1, CALLS + 1):
            found = (torch.compile(model, backend="eager") if graph else model)(x)
            assert moved.place == FAR + calls * LENGTH
            if calls == 1:
                for table, other in zip(found, true, strict=True):
                    torch.testing.assert_close(table.float(), other, rtol=0, atol=2.0**-8)
    finally:
        for name in ("moves_elsewhere", "asks_elsewhere"):
            sys.modules.pop(name, None)
