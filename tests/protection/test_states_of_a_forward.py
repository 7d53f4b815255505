"""What a forward writes to its own buffers is the module's state: a clock is set, and set back, as in stock.

The truth is the same code without the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safe_rope

pytestmark = pytest.mark.contract
SIZE = 16


class Timed(nn.Module):
    time: Tensor

    def __init__(self, with_weights: bool) -> None:
        super().__init__()
        self.register_buffer("rates", 10000.0 ** -(torch.arange(SIZE).float() / SIZE))
        self.register_buffer("time", self.begin(), persistent=False)
        if with_weights:
            self.linear = nn.Linear(SIZE, SIZE, bias=False)
            nn.init.eye_(self.linear.weight)

    def begin(self) -> Tensor:
        return torch.zeros(64, 1)

    def passed(self, seconds: float) -> Tensor:
        return torch.arange(64.0)[:, None] * seconds

    def forward(self, seconds: float, anew: bool = False) -> Tensor:
        if anew:
            self.time.zero_()
        self.time.add_(self.passed(seconds))
        waves = torch.sin(self.time * self.rates)
        return self.linear(waves) if hasattr(self, "linear") else waves


class Oscillator(Timed):
    def begin(self) -> Tensor:
        return torch.zeros(SIZE)

    def passed(self, seconds: float) -> Tensor:
        return self.rates * seconds


class BegunLater(Oscillator):
    """Its first state is a table, which its constructor makes."""

    def begin(self) -> Tensor:
        return torch.linspace(0.1, 0.7, SIZE)


def nothing(model: Timed) -> None:
    pass


def zero(model: Timed) -> None:
    model.time.zero_()


def assign(model: Timed) -> None:
    model.time = torch.zeros_like(model.time)


def by_data(model: Timed) -> None:
    model.time.data.zero_()


def back(model: Timed) -> None:
    model.time.copy_(model.begin())


def round_up(model: Timed) -> None:
    model.time.fill_(1e9)


ACTS: tuple[Callable[[Timed], None], ...] = (nothing, zero, assign, by_data, back, round_up)


def guarded(build: Callable[[], Any]) -> Any:
    with safe_rope.guard():
        return build()


def late(build: Callable[[], Any]) -> Any:
    model = build()
    safe_rope.protect(model)
    return model


def used(model: Timed, act: Callable[[Timed], None]) -> list[Tensor]:
    results = [model(1.0), model(0.5)]
    act(model)
    results += [model(1.0), model(2.0, anew=True), model(1.0)]
    act(model)
    return [*results, model(0.25), model.time.clone()]


@pytest.mark.parametrize("protected", [guarded, late])
@pytest.mark.parametrize("with_weights", [False, True], ids=("without weights", "with weights"))
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", [Timed, Oscillator, BegunLater])
def test_a_clock_is_set_as_in_stock(kind: Any, act: Any, with_weights: bool, protected: Any) -> None:
    true = used(kind(with_weights), act)
    got = used(protected(lambda: kind(with_weights)), act)
    for expected, one in zip(true, got, strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("kind", [Timed, Oscillator])
def test_a_cast_rounds_no_time_that_was_set_back(kind: Any) -> None:
    model, true = guarded(lambda: kind(False)), kind(False)
    for one in (model, true):
        one(1.0)
        one.time.zero_()
        one(0.3)
    got = model.to(torch.bfloat16)(0.3)
    assert (got.float() - true(0.3)).abs().max() <= torch.finfo(torch.bfloat16).eps


class Ticking(BegunLater):
    """A method of its own writes its time, and forward only reads it."""

    def tick(self, seconds: float) -> None:
        self.time.add_(self.passed(seconds))

    def forward(self, seconds: float, anew: bool = False) -> Tensor:
        return torch.sin(self.time + seconds)


@pytest.mark.parametrize("protected", [guarded, late])
@pytest.mark.parametrize("act", ACTS)
def test_what_has_moved_on_is_set_back_as_in_stock(act: Any, protected: Any) -> None:
    results = []
    for model in (Ticking(False), protected(lambda: Ticking(False))):
        for _ in range(2):
            model.tick(1.0)
            results.append(model(0.0))
            act(model)
            results.append(model(0.1))
    half = len(results) // 2
    for true, got in zip(results[:half], results[half:], strict=True):
        assert torch.equal(got, true)
