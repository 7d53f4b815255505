"""Run somebody's code for its answer alone: what it changes outside of a module is put back.

Constructors count their instances, enter themselves into registries and keep tables on a class; forwards keep
tables in a dictionary of their Python module.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import nn

from safe_rope._base import methods
from safe_rope._base.containers import held_in
from safe_rope._base.random_states import random_states, set_random_states
from safe_rope._recognition.outside import (
    CONTAINERS,
    Outside,
    Place,
    is_an_object,
    outside,
    place_of,
    remembering_in,
)

_PLAIN = (bool, int, float, str, type(None))
_NO_NUMBERS = {
    *(bool, int, str, bytes, type(None), object, torch.dtype, torch.device, torch.layout, torch.Size),
    *(dict, list, tuple, set, frozenset),  # empty ones, as what they hold is looked at
}
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_OF_ITERATORS = ("builtins", "itertools")  # that a copy can be made of
_LONGEST = 4096
_MOST = 1024
"""Values of what may hold a table that are looked at."""


class Untouched:
    """While open, notes what a class's code keeps on classes and in its Python modules, and undoes it.

    So it does with what the code can get at `outside` of them: closures, default values, global objects.

    Args:
        cls: the class whose code runs.
        held: what a module of that class holds.
        anew: hide the tables that are kept already where code finds them again (on classes, in their
            modules, in registries and what a thread has for itself), so that they are made again.
        context: the context variables to `run` with, those of now by default.

    ``changed`` tells afterwards whether a table was kept there, ``moved`` whether anything was changed.

    Raises:
        OutOfReachError: the code takes from a generator, which nobody can put back.

    """

    def __init__(
        self,
        cls: type,
        held: Iterable[Any] = (),
        *,
        anew: bool = False,
        context: contextvars.Context | None = None,
    ) -> None:
        self._anew, self._context = anew, context
        bases = [*methods.bases(cls)]
        modules = [sys.modules.get(base.__module__) for base in bases]
        owners = [place for place in dict.fromkeys([*bases, *modules]) if place is not None]
        functions = [
            value
            for place in owners
            for value in vars(place).values()
            if type(value) is types.FunctionType and vars(value)
        ]
        self._own = [place_of(owner) for owner in (*owners, *functions)]
        self._outside: Outside = outside(cls, held)
        self._containers: list[tuple[Any, Any]] = []
        self._values: list[tuple[Place, str, Any]] = []
        self._names: list[tuple[Place, set[str]]] = []
        self._iterators: list[tuple[Place, str, Any]] = []
        self._functions: list[tuple[Any, int]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._environment: dict[str, str] | None = None
        self._arrays: list[tuple[Any, Any]] = []
        self._of_own = 0, 0
        self._hidden: list[tuple[Any, str | None]] = []
        self.changed = self.moved = False

    def __enter__(self) -> Untouched:
        for place in self._own:
            self._note(place)
        self._of_own = len(self._containers), len(self._values)
        for place in self._outside.places:
            self._note(place)
        for container in self._outside.containers:
            self._containers.append((container, container.copy()))
        for cell in self._outside.cells:
            self._cells.append((cell, cell.cell_contents))
        for function in self._outside.remembering:
            self._functions.append((function, function.cache_info().currsize))
        with torch.no_grad():
            self._tensors = [(one, one._version, one.clone()) for one in self._outside.tensors]
        self._arrays = [(one, one.copy()) for one in self._outside.arrays]
        self._generators = [(one, one.get_state()) for one in self._outside.generators]
        if "environ" in self._outside.names:
            self._environment = dict(os.environ)
        if self._anew:
            self._hide(objects=True)
        return self

    def run(self, called: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something; the context variables that it sets are set for it alone.

        Where it makes some of the hidden objects not anew, it is called again with those in their places.
        They may be settings, for which it takes others where it finds none.
        """
        if not self._hidden:
            return self._run(called, *args, **kwargs)
        states = random_states()
        try:
            result = self._run(called, *args, **kwargs)
        except Exception:  # noqa: BLE001 - a foreign constructor
            made_anew = self._made_anew()
        else:
            made_anew = self._made_anew()  # a weak dictionary keeps it no longer than the result
            if made_anew == self._hidden:
                return result
            del result
        self.put_back()
        set_random_states(states)
        self.changed = self.moved = False
        self._hide(objects=False)
        for owner, name in made_anew:
            if name is None:
                owner.clear()
            elif isinstance(owner.owner, type):
                owner.put(name, None)
            else:
                owner.drop(name)
        return self._run(called, *args, **kwargs)

    def _made_anew(self) -> list[tuple[Any, str | None]]:
        """What was hidden and is there again."""
        return [
            (owner, name)
            for owner, name in self._hidden
            if (owner if name is None else owner.held.get(name) is not None)
        ]

    def _run(self, called: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = contextvars.copy_context() if self._context is None else self._context.copy()
        before = dict(context)
        try:
            return context.run(called, *args, **kwargs)
        finally:
            self.moved |= any(before.get(variable, self) is not value for variable, value in context.items())

    def _note(self, place: Place) -> None:
        self._names.append((place, set(place.held)))
        for name, value in place.items():
            if (function := remembering_in(value)) is not None:
                self._functions.append((function, function.cache_info().currsize))
            elif type(value) in CONTAINERS and len(value) <= _LONGEST:
                self._containers.append((value, value.copy()))
            elif type(value) in _PLAIN or _holds_tables(value):
                self._values.append((place, name, value))
            elif type(value).__module__ in _OF_ITERATORS and issubclass(type(value), Iterator):
                with contextlib.suppress(TypeError):  # a generator
                    self._iterators.append((place, name, copy.copy(value)))

    def _hide(self, *, objects: bool) -> None:
        """Hide the tables of the classes and their modules; of ``objects``, and what is outside, note it."""
        given = self._outside.given
        containers, values = (None, None) if objects else self._of_own
        for container, before in self._containers[:containers]:
            if id(container) not in given and _holds_tables(before, objects=objects):
                container.clear()
                if objects and not _holds_tables(before, objects=False):
                    self._hidden.append((container, None))
        for place, name, value in self._values[:values]:
            owner: Any = place.owner
            if id(owner) in given or name not in place.held or not _holds_tables(value, objects=objects):
                continue  # a function may be met twice
            is_table = issubclass(type(value), torch.Tensor)
            with contextlib.suppress(Exception):  # a class of classes may refuse it
                if isinstance(owner, types.FunctionType | threading.local):
                    place.drop(name)
                elif isinstance(owner, type) and (is_table or is_an_object(value)):
                    place.put(name, None)
                if place.held.get(name) is not value and not _holds_tables(value, objects=False):
                    self._hidden.append((place, name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Put back what was noted."""
        for container, before in self._containers:
            if not _is_as_before(container, before):
                self._tell(container)
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(before)
        for place, name, value in self._values:
            now = place.held.get(name, self)
            if now is not value:
                self._tell(now)
                place.put(name, value)
        for place, names in self._names:
            for name in self._outside.names.intersection(place.held) - names:
                self._tell(place.held[name])
                place.drop(name)
        for place, name, iterator in self._iterators:
            self.moved |= repr(place.held.get(name)) != repr(iterator) or not isinstance(iterator, count)
            place.put(name, copy.copy(iterator))
        for function, size in self._functions:
            if function.cache_info().currsize != size:
                self.changed |= _remembers_numbers(function)
                function.cache_clear()
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                self._tell(cell.cell_contents)
                cell.cell_contents = value
        with torch.no_grad():
            for tensor, version, values in self._tensors:
                if tensor._version != version:
                    self.moved = True
                    tensor.copy_(values)
        for array, numbers in self._arrays:
            if array.tobytes() != numbers.tobytes():
                self.moved = True
                array[...] = numbers
        for generator, state in self._generators:
            self.moved |= not torch.equal(generator.get_state(), state)
            generator.set_state(state)
        if self._environment is not None and self._environment != dict(os.environ):
            self.moved = True
            os.environ.clear()
            os.environ.update(self._environment)

    def _tell(self, value: Any) -> None:
        self.moved = True
        self.changed |= _holds_tables(value)


class Before:
    """What the code of a class can get at, as it was when this was made, for code that runs later.

    Args:
        cls: the class whose code is to run.
        held: what its constructor is given.

    Raises:
        OutOfReachError: as for `Untouched`.

    """

    def __init__(self, cls: type, held: Iterable[Any]) -> None:
        self._untouched = Untouched(cls, held).__enter__()
        self._states = random_states()
        self.context = contextvars.copy_context()

    def put_back(self) -> None:
        """Let everything be as it was; `Untouched` and `random_states_kept` undo this."""
        self._untouched.put_back()
        set_random_states(self._states)


def _holds_tables(value: Any, *, objects: bool = True) -> bool:
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if issubclass(type(one), torch.Tensor):
            return True
        if type(one) not in _PLAIN and id(one) not in seen and len(seen) < _MOST:
            seen.add(id(one))
            is_object = objects and is_an_object(one) and not issubclass(type(one), nn.Module | type)
            waiting += vars(one).values() if is_object else held_in(one)
    return False


def _remembers_numbers(function: Any) -> bool:
    """Whether what ``functools.lru_cache`` remembers may be a table: text, integers and code are none.

    Python's collector is asked for what an object holds. One that it knows nothing of counts as a table.
    """
    waiting, seen = gc.get_referents(function), {id(vars(function))}
    while waiting and len(seen) < _LONGEST:
        one = waiting.pop()
        if id(one) in seen or issubclass(type(one), _CODE):
            continue
        seen.add(id(one))
        held = gc.get_referents(one)
        is_entry = type(one).__module__ == "functools"  # the function holds its results itself, too
        if issubclass(type(one), torch.Tensor) or not (held or type(one) in _NO_NUMBERS or is_entry):
            return True
        waiting += held
    return bool(waiting)


def _is_as_before(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, Mapping):
        return all(
            key in before and container[key] is value for key, value in before.items() if key in container
        )
    if isinstance(container, set):
        return bool(container == before)
    return all(one is other for one, other in zip(container, before, strict=True))
