"""Rotary modules that their parent keeps and has not registered are measured, and protected."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.default_dtype import default_dtype
from support.own_rotary import Rotary
from torch import nn

import safe_rope
from safe_rope._recognition import holdings, walk

BF16, DIM, LENGTH = torch.bfloat16, 32, 300


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)
        self.held: Any = None


class Box:
    __slots__ = ("rope",)

    def __init__(self, rope: nn.Module) -> None:
        self.rope = rope


KEPT: dict[str, Callable[[Any], Any]] = {
    "directly": lambda rope: rope,
    "nested": lambda rope: {"text": [(rope,)]},
    "object": Box,
    "objects": lambda rope: [Box(rope)],
    "namespace": lambda rope: types.SimpleNamespace(rope=rope),
    "partial": lambda rope: functools.partial(rope, torch.zeros(1)),
    "method": lambda rope: rope.forward,
    "closure": lambda rope: lambda x: rope(x, torch.arange(4)),
}


@pytest.mark.parametrize("how", KEPT)
def test_what_nobody_has_registered_is_measured_and_protected(how: str) -> None:
    rope, parent = Rotary(), Parent()
    object.__setattr__(parent, "held", KEPT[how](rope))
    model = nn.Sequential(parent)
    assert safe_rope.audit(model).ok
    rope.bfloat16()
    report = safe_rope.audit(model)
    assert [one.verdict for one in report.modules] == ["damaged"]
    assert report.modules[0].path.startswith("0.held")
    safe_rope.protect(model)
    assert torch.equal(rope.inv_freq, Rotary().inv_freq)
    assert safe_rope.audit(model).ok


class Unmade(nn.Module):
    """Its constructor does not call that of torch."""

    def __init__(self) -> None:
        pass


class Weak:
    """Can have weak references."""


ODD: dict[str, Callable[[nn.Module], Any]] = {
    "a dead proxy": lambda rope: weakref.proxy(Weak()),
    "dead proxies": lambda rope: {"a": [weakref.proxy(Weak())], "b": weakref.proxy(Weak())},
    "a proxy": weakref.proxy,
    "proxies": lambda rope: [weakref.proxy(rope)],
    "a module that was never made": lambda rope: Unmade(),
    "modules that were never made": lambda rope: [Unmade()],
}


@pytest.mark.parametrize("odd", ODD)
def test_what_stands_for_a_module_and_is_none_is_left_alone(odd: str) -> None:
    rope, parent = Rotary(), Parent()
    object.__setattr__(parent, "held", ODD[odd](rope))
    model = nn.Sequential(parent, rope)
    assert safe_rope.audit(model).ok
    rope.bfloat16()
    assert safe_rope.audit(model).damaged
    assert [part.path for part in safe_rope.protect(model).protected] == ["1"]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The values in containers that walks have looked at, by their names."""
    names: list[str] = []

    def inside(*arguments: Any) -> Iterator[tuple[Any, Any]]:
        for name, value in holdings.inside(*arguments):
            names.append(name)
            yield name, value

    monkeypatch.setattr(walk, "inside", inside)
    return names


def test_a_registry_that_many_modules_share_is_looked_at_once(looked_at: list[str]) -> None:
    rope, parents = Rotary(), [Parent() for _ in range(200)]
    registry: Any = {str(i): {str(j): [j] for j in range(100)} for i in range(100)}
    registry["7"]["rope"] = rope
    for parent in parents:
        parent.held = registry
    model = nn.Sequential(*parents)
    rope.bfloat16()
    assert [part.path for part in walk.parts(model)][-1] == "0.held.7.rope"
    assert len(looked_at) == 100 + 100 * 100 + 1 + 100 * 100
    assert safe_rope.audit(model).damaged


def test_what_is_near_is_found_behind_a_registry_of_any_size(looked_at: list[str]) -> None:
    rope, first, last = Rotary(), Parent(), Parent()
    first.held = [[[0] * 250 for _ in range(250)] for _ in range(250)]
    object.__setattr__(last, "held", [{"rope": rope}])
    model = nn.Sequential(first, last)
    rope.bfloat16()
    assert [part.path for part in walk.parts(model)][-1] == "1.held.0.rope"
    assert len(looked_at) <= 100_001  # the one that ends a walk is looked at, too
    assert safe_rope.audit(model).damaged


class SlopeOfEachHead(nn.Module):
    """ALiBi with a list of numbers, each in a tensor of its own."""

    def __init__(self, heads: int = 12) -> None:
        super().__init__()
        self.slopes = [torch.tensor(2 ** (-8 * (head + 1) / heads)) for head in range(heads)]

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(scores.shape[-1])
        away = places[None] - places[:, None]
        return scores + torch.stack([slope * away for slope in self.slopes])


def test_numbers_of_a_list_are_measured_and_protected() -> None:
    scores = torch.zeros(1, 12, LENGTH, LENGTH, dtype=BF16)
    with default_dtype(BF16):
        stock = SlopeOfEachHead()
    assert safe_rope.audit(nn.Sequential(SlopeOfEachHead())).ok
    assert {one.severity for one in safe_rope.audit(nn.Sequential(stock)).findings} == {"damaged"}
    with safe_rope.guard(), default_dtype(BF16):
        guarded = SlopeOfEachHead()
    true, answer = SlopeOfEachHead()(scores.float()), guarded(scores)
    assert answer.dtype == stock(scores).dtype
    assert (answer.float() - true).abs().max() < 0.5 * (stock(scores).float() - true).abs().max()
    assert safe_rope.audit(nn.Sequential(guarded)).ok


class Temperatures(nn.Module):
    """Numbers of a list that are no slopes, in a module that counts; an optimizer may have them."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.listed = [torch.tensor([0.1 * (head + 1)]) for head in range(heads)]

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        is_seen = torch.arange(scores.shape[-1]) <= LENGTH
        return torch.stack([scores * one for one in self.listed]) * is_seen


def test_other_numbers_of_a_list_are_nobodys_tables() -> None:
    trained = Temperatures()
    for one in trained.listed:
        one.add_(0.3)
    assert safe_rope.audit(nn.Sequential(trained)).ok
    scores = torch.ones(1, 8, dtype=BF16)
    with default_dtype(BF16):
        stock = Temperatures()
        with safe_rope.guard():
            guarded = Temperatures()
    assert torch.equal(guarded(scores), stock(scores))
    assert safe_rope.audit(nn.Sequential(guarded)).ok
