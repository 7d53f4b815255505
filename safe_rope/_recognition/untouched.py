"""Run somebody's code for its answer alone: what it changes outside of a module is put back.

Constructors count their instances, enter themselves into registries and keep tables on a class; forwards keep
tables in a dictionary of their Python module.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
from collections import deque
from typing import Any

import torch

REMEMBERING = type(functools.lru_cache(lambda: None))
"""The class of a function that remembers its results."""
_CONTAINERS = (dict, list, set, deque)
_PLAIN = (bool, int, float, str, type(None))
_LONGEST = 4096


class Untouched:
    """While open, notes what a class's code keeps on classes and in its Python modules, and undoes it.

    Args:
        cls: the class whose code runs.
        anew: hide the tables that are kept there already, so that they are made again.

    ``changed`` tells afterwards whether a table was kept there.
    """

    def __init__(self, cls: type, *, anew: bool = False) -> None:
        self._anew = anew
        bases = [b for b in cls.__mro__ if b is not object and not b.__module__.startswith("torch.")]
        modules = [sys.modules.get(base.__module__) for base in bases]
        places = [place for place in dict.fromkeys([*bases, *modules]) if place is not None]
        functions = [
            value
            for place in places
            for value in vars(place).values()
            if isinstance(value, types.FunctionType) and vars(value)
        ]
        self._places: list[Any] = [*places, *functions]
        self._containers: list[tuple[Any, Any]] = []
        self._values: list[tuple[Any, str, Any]] = []
        self._counters: list[tuple[Any, str, Any]] = []
        self._functions: list[tuple[Any, int]] = []
        self.changed = False

    def __enter__(self) -> Untouched:
        for place in self._places:
            for name, value in list(vars(place).items()):
                if name.startswith("__"):
                    continue
                function = getattr(value, "__func__", value)
                if isinstance(function, REMEMBERING):
                    self._functions.append((function, function.cache_info().currsize))
                elif type(value) in _CONTAINERS and len(value) <= _LONGEST:
                    self._containers.append((value, value.copy()))
                elif type(value) in _PLAIN or _holds_tables(value):
                    self._values.append((place, name, value))
                elif isinstance(value, itertools.count):
                    self._counters.append((place, name, copy.copy(value)))
        if self._anew:
            for container, before in self._containers:
                if _holds_tables(before):
                    container.clear()
            for place, name, value in self._values:
                if isinstance(place, types.FunctionType) and _holds_tables(value):
                    delattr(place, name)
                elif isinstance(value, torch.Tensor) and isinstance(place, type):
                    setattr(place, name, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        for container, before in self._containers:
            if not _is_as_before(container, before):
                self.changed |= _holds_tables(container)
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(before)
        for place, name, value in self._values:
            now = vars(place).get(name, self)
            if now is not value:
                self.changed |= _holds_tables(now)
                setattr(place, name, value)
        for place, name, counter in self._counters:
            setattr(place, name, counter)
        for function, size in self._functions:
            if function.cache_info().currsize != size:
                self.changed = True
                function.cache_clear()


def _holds_tables(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_holds_tables, value.values()))
    return isinstance(value, list | tuple | set | deque) and any(map(_holds_tables, value))


def _is_as_before(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(
            key in before and container[key] is value for key, value in before.items() if key in container
        )
    if isinstance(container, set):
        return bool(container == before)
    return all(one is other for one, other in zip(container, before, strict=True))
