"""A guard runs constructors again, and what they count on outside of their module goes on as without it.

Each module takes the scale of its frequencies from something that its constructor moves on. The truth is what
a model without the library gets, in FP32.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import itertools
import os
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safe_rope
from safe_rope import PrecisionWarning
from safe_rope.constructors._default_dtype import default_dtype

DIM, LENGTH, LAYERS = 16, 300, 3


class Counter:
    """Moves on whenever it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self) -> int:
        self.count += 1
        return self.count


class OnAClass:
    """Counts on the class."""

    count = 0

    @classmethod
    def advance(cls) -> int:
        cls.count += 1
        return cls.count


def ever_more() -> Iterator[int]:
    yield from itertools.count(1)


COUNTER, NUMBERED, NUMBERS, ON_A_THREAD, PLACE = (
    Counter(),
    Counter(),
    np.zeros(1, dtype=int),
    threading.local(),
    0,
)
TENSOR, QUEUE, TALLY = (
    torch.zeros((), dtype=torch.int64),
    collections.deque[int](),
    collections.Counter[str](),
)
IN_A_CONTEXT, FILE = contextvars.ContextVar("count", default=0), types.SimpleNamespace(counts=[0])
DRAWN, GENERATOR = torch.Generator(), ever_more()


def reset() -> None:
    """Put back what constructors move on."""
    global PLACE, GENERATOR
    COUNTER.count, NUMBERED.count, NUMBERS[0], ON_A_THREAD.count, PLACE, OnAClass.count = 0, 0, 0, 0, 0, 0
    TENSOR.zero_()
    QUEUE.clear()
    QUEUE.extend(range(1, 20))
    TALLY.clear()
    IN_A_CONTEXT.set(0)
    FILE.counts, GENERATOR = [0], ever_more()
    DRAWN.manual_seed(4)
    os.environ["SAFE_ROPE_TEST_COUNT"] = "0"
    random.seed(5)
    torch.manual_seed(6)


def assigned() -> int:
    global PLACE
    PLACE += 1
    return PLACE


def counted_in_numpy() -> int:
    NUMBERS[0] += 1
    return int(NUMBERS[0])


def counted_on_a_thread() -> int:
    ON_A_THREAD.count += 1
    return int(ON_A_THREAD.count)


def tallied() -> int:
    TALLY["count"] += 1
    return TALLY["count"]


def counted_in_a_tensor() -> int:
    TENSOR.add_(1)
    return int(TENSOR)


def counted_in_a_context() -> int:
    IN_A_CONTEXT.set(IN_A_CONTEXT.get() + 1)
    return IN_A_CONTEXT.get()


def appended() -> int:
    FILE.counts.append(len(FILE.counts))
    return int(FILE.counts[-1])


def counted_in_the_environment() -> int:
    os.environ["SAFE_ROPE_TEST_COUNT"] = str(int(os.environ["SAFE_ROPE_TEST_COUNT"]) + 1)
    return int(os.environ["SAFE_ROPE_TEST_COUNT"])


def drawn() -> int:
    return int(torch.randint(1, 50, (1,), generator=DRAWN, device="cpu"))


def drawn_by_python() -> int:
    return random.randint(1, 50)


def closure() -> Callable[[], int]:
    count = 0

    def advance() -> int:
        nonlocal count
        count += 1
        return count

    return advance


def next_of_a_generator() -> int:
    return next(GENERATOR)


def table(scale: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return scale / 10000.0 ** (torch.arange(0, DIM, 2, dtype=dtype) / DIM)


class Rotary(nn.Module):
    """Has frequencies that are scaled by a number which somebody counts."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.register_buffer("inv_freq", table(count()), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq)
        return phase.cos(), phase.sin()


class CountsFirst(Rotary):
    """Counts before its base's constructor begins, where nobody sees it begin."""

    def __init__(self, count: Callable[[], int]) -> None:
        scale = count()
        super().__init__(lambda: scale)


class IsNumbered(Rotary):
    """Keeps its number, as layers do."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__(count)
        self.number = NUMBERED.advance()


class Model(nn.Module):
    def __init__(self, make: type[Rotary], count: Callable[[], int]) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(make(count) for _ in range(LAYERS))


COUNTS: dict[str, Callable[[], Callable[[], int]]] = {
    "a global object": lambda: COUNTER.advance,
    "a class": lambda: OnAClass.advance,
    "a global": lambda: assigned,
    "an array": lambda: counted_in_numpy,
    "a thread's": lambda: counted_on_a_thread,
    "a queue": lambda: QUEUE.popleft,
    "a tally": lambda: tallied,
    "a tensor": lambda: counted_in_a_tensor,
    "a context variable": lambda: counted_in_a_context,
    "a list": lambda: appended,
    "the environment": lambda: counted_in_the_environment,
    "random numbers": lambda: drawn,
    "Python's random numbers": lambda: drawn_by_python,
    "a closure": closure,
    "a generator": lambda: next_of_a_generator,
}


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "low default": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


def true_scales(count: Callable[[], int]) -> list[int]:
    reset()
    return [count() for _ in range(LAYERS)]


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("make", [Rotary, CountsFirst, IsNumbered])
def test_what_constructors_count_goes_on_as_without_a_guard(
    make: type[Rotary], name: str, around: str
) -> None:
    scales = true_scales(COUNTS[name]())
    reset()
    count = COUNTS[name]()
    with warnings.catch_warnings(record=True) as caught, safe_rope.guard() as session:
        warnings.simplefilter("always")
        with SURROUNDINGS[around]():
            model = Model(make, count)
        model.to_empty(device="cpu") if around == "meta" else model.to(torch.bfloat16)
    following = count()
    reset()
    count = COUNTS[name]()
    assert following == [count() for _ in range(LAYERS + 1)][-1]
    told = bool(session.report.unprotected) and PrecisionWarning in {one.category for one in caught}
    may_be_told = make is CountsFirst or name == "a generator"
    for layer, scale in zip(model.layers, scales, strict=True):
        cos, _ = layer(torch.zeros(1, LENGTH, DIM, dtype=torch.bfloat16))
        true = torch.outer(torch.arange(LENGTH).double(), table(scale, torch.float32).double()).cos()
        is_exact = bool(((cos.double() - true).abs() < 2.0**-8).all())
        assert is_exact or (may_be_told and told)


class Shared:
    """A configuration that holds what all who get it count with."""

    def __init__(self) -> None:
        self.counter, self.tally = Counter(), {"layers": 0}


class IsConfigured(nn.Module):
    """Takes its scale from an object in its configuration, and its number from a dictionary there."""

    def __init__(self, config: Shared) -> None:
        super().__init__()
        config.tally["layers"] += 1
        self.scale, self.number = config.counter.advance(), config.tally["layers"]
        self.register_buffer("inv_freq", table(self.scale), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq).cos()


@pytest.mark.parametrize("around", SURROUNDINGS)
def test_what_a_configuration_holds_goes_on_as_without_a_guard(around: str) -> None:
    config = Shared()
    with safe_rope.guard(), SURROUNDINGS[around]():
        model = nn.ModuleList(IsConfigured(config) for _ in range(LAYERS))
    model.to_empty(device="cpu") if around == "meta" else model.to(torch.bfloat16)
    assert (config.counter.count, config.tally) == (LAYERS, {"layers": LAYERS})
    for scale, layer in enumerate(model, start=1):
        assert (layer.scale, layer.number) == (scale, scale)
        found = layer(torch.zeros(1, LENGTH, DIM, dtype=torch.bfloat16))
        true = torch.outer(torch.arange(LENGTH).double(), table(scale, torch.float32).double()).cos()
        assert ((found.double() - true).abs() < 2.0**-8).all()
