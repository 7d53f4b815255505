"""Tables in objects that code outside of a module hands out again are made anew, and mended."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.default_dtype import default_dtype
from torch import Tensor, nn

import safe_rope

DIM, ROWS = 16, 300


@dataclass
class Pair:
    cos: Tensor
    sin: Tensor


def made() -> Pair:
    phases = torch.arange(ROWS)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    return Pair(phases.cos(), phases.sin())


class Registry:
    """Hands out what it has made once."""

    def __init__(self) -> None:
        self.tables: dict[int, Pair] = {}

    def get(self, dim: int) -> Pair:
        if dim not in self.tables:
            self.tables[dim] = made()
        return self.tables[dim]


class Once(type):
    """Makes one object of each class."""

    objects: dict[Any, Any] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in Once.objects:
            Once.objects[cls] = super().__call__(*args)
        return Once.objects[cls]


class Single(metaclass=Once):
    """The only one of its class."""

    def __init__(self) -> None:
        self.cos, self.sin = made().cos, made().sin


class Flyweight:
    """One object for each size, which its ``__new__`` has to be told."""

    of: dict[int, Any] = {}
    cos: Tensor
    sin: Tensor

    def __new__(cls, dim: int) -> Any:
        if dim not in cls.of:
            cls.of[dim] = super().__new__(cls)
            cls.of[dim].cos, cls.of[dim].sin = made().cos, made().sin
        return cls.of[dim]


OBJECTS: dict[int, Pair] = {}
WEAK: weakref.WeakValueDictionary[int, Pair] = weakref.WeakValueDictionary()
REGISTRY = Registry()
THREAD = threading.local()


def of_a_dictionary() -> Any:
    if DIM not in OBJECTS:
        OBJECTS[DIM] = made()
    return OBJECTS[DIM]


def of_a_weak_dictionary() -> Any:
    found = WEAK.get(DIM)
    if found is None:
        found = WEAK[DIM] = made()
    return found


def of_a_registry() -> Any:
    return REGISTRY.get(DIM)


def of_a_thread() -> Any:
    if not hasattr(THREAD, "pair"):
        THREAD.pair = made()
    return THREAD.pair


def of_a_metaclass() -> Any:
    return Single()


def of_its_class() -> Any:
    return Flyweight(DIM)


HANDED_OUT = (
    of_a_dictionary,
    of_a_weak_dictionary,
    of_a_registry,
    of_a_thread,
    of_a_metaclass,
    of_its_class,
)


class Holds(nn.Module):
    """Holds what others may hold, too."""

    hand_out: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.pair = type(self).hand_out()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.pair.cos.to(x), self.pair.sin.to(x)), dim=-1)


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    for kept in (OBJECTS, REGISTRY.tables, vars(THREAD), Once.objects, Flyweight.of):
        kept.clear()


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("hand_out", HANDED_OUT, ids=lambda one: one.__name__)
def test_they_are_made_again(hand_out: Callable[[], Any], how: str) -> None:
    cls = type("Holds", (Holds,), {"hand_out": staticmethod(hand_out)})
    true = torch.cat((made().cos, made().sin), dim=-1)
    with default_dtype(torch.bfloat16):
        if how == "guard":
            with safe_rope.guard():
                model = cls()
        else:
            model = cls()
            safe_rope.protect(model)
    assert torch.equal(model(torch.empty(1, dtype=torch.bfloat16)), true.bfloat16())


class Settings:
    """Numbers, and a tensor besides."""

    def __init__(self) -> None:
        self.base, self.weight = 10000.0, torch.ones(1)


class Sealed(type):
    """Lets nobody change its classes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(name)


class Constants(metaclass=Sealed):
    """What is not to be changed."""

    settings = Settings()


SETTINGS: dict[str, Any] = {"rope": Settings()}
LISTED = [Settings()]
OF_THREAD = threading.local()


class Configured(nn.Module):
    """Takes another base where it finds no settings."""

    settings: Any = Settings()
    found: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        settings = type(self).found(type(self))
        base = 500_000.0 if settings is None else settings.base
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, DIM, 2).float() / DIM))

    def forward(self, length: int) -> Tensor:
        return torch.outer(torch.arange(length).float(), self.inv_freq.float())


FOUND: dict[str, Callable[[Any], Any]] = {
    "on its class": lambda cls: cls.settings,
    "in a registry": lambda _: SETTINGS.get("rope"),
    "of a thread": lambda _: getattr(OF_THREAD, "settings", None),
    "in a list": lambda _: LISTED[0],
    "on a sealed class": lambda _: Constants.settings,
}


@pytest.mark.parametrize("found", FOUND.values(), ids=[*FOUND])
def test_settings_that_hold_a_tensor_are_read_as_they_are(found: Callable[[Any], Any]) -> None:
    OF_THREAD.settings = Settings()
    cls = type("Configured", (Configured,), {"found": staticmethod(found)})
    true, before = cls()(ROWS), found(cls)
    for model in (cls(), cls().to(torch.bfloat16)):
        is_cast = model.inv_freq.dtype == torch.bfloat16
        assert safe_rope.audit(model).verdict == ("damaged" if is_cast else "ok")
        safe_rope.protect(model)
        assert torch.equal(model(ROWS), true)
        assert safe_rope.audit(model).verdict == "ok"
        assert found(cls) is before
        assert SETTINGS
        assert LISTED
