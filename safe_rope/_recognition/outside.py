"""What the code of a class can change outside of its module, followed from function to function by name.

That is the globals that they name, what closures and default values hold, and the objects in there. Nobody
looks into libraries: what changes there is not the business of a position module.
"""

from __future__ import annotations

import collections
import functools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base.functions import default_values, filled_cells
from safe_rope._base.methods import names_in

logger = logging.getLogger(__name__)

CONTAINERS = (
    *(dict, list, set, collections.deque),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
    weakref.WeakValueDictionary,
)
_LIBRARIES = {
    *sys.stdlib_module_names,
    "torch",
    "numpy",
    "transformers",
    "deepspeed",
    "accelerate",
    "safe_rope",
    *("_pytest", "pytest"),  # its assertions are in the code of each module of tests
}
REMEMBERING: Any = type(functools.lru_cache(lambda: None))
"""The class of a function that remembers its results."""
_METHODS = (staticmethod, classmethod, types.MethodType)
_DEPTH = 8
"""Wrappers around a function that are looked through."""
_ENOUGH = 2048
"""Values that are looked at."""


class OutOfReachError(Exception):
    """Code takes from something that no copy can be made of, as from a generator."""


class Place(NamedTuple):
    """Something that has values by name, and how they are put there."""

    owner: Any
    held: Mapping[str, Any]
    put: Callable[[str, Any], None]
    names: Iterable[str] | None = None
    """The names that count, None for all."""

    def drop(self, name: str) -> None:
        """Take away what has that name."""
        if isinstance(self.owner, type | types.FunctionType):
            delattr(self.owner, name)
        elif isinstance(self.held, dict):
            del self.held[name]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values, those of Python's own left out."""
        for name in tuple(self.held) if self.names is None else self.names:
            if name in self.held and not name.startswith("__"):
                yield name, self.held[name]


class Outside:
    """What was found: places, containers, cells of closures and generators of random numbers."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.containers: list[Any] = []
        self.cells: list[types.CellType] = []
        self.generators: list[torch.Generator] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.remembering: list[Any] = []
        self.names: set[str] = set()
        self.given: set[int] = set()
        """Ids of what only a module, or its constructor's arguments, lead to."""


def place_of(owner: Any, names: Iterable[str] | None = None) -> Place:
    """Return a module, class, function or object as a place."""
    return Place(owner, vars(owner), functools.partial(setattr, owner), names)


def outside(cls: type, held: Iterable[Any] = ()) -> Outside:
    """Return what the code of a class, and that of functions which its module holds, can get at.

    Args:
        cls: any class; the code of a library's is not followed.
        held: what a module of that class holds, or what its constructor is given.

    Raises:
        OutOfReachError: a generator is among what its functions name or hold.

    """
    found, seen = Outside(), set[int]()
    waiting = collections.deque((base, False) for base in cls.__mro__ if is_followed(base))
    for one in held:
        # A copy of a configuration shares what that holds.
        given = (one, *(vars(one).values() if _is_configuration(one) else ()))
        waiting += ((value, True) for value in given)
    while waiting and len(seen) < _ENOUGH:
        value, is_given = waiting.popleft()  # what is near comes first, whatever hangs on it
        if id(value) not in seen:
            seen.add(id(value))
            if is_given:
                found.given.add(id(value))
            try:
                waiting += ((inner, is_given) for inner in _look_at(value, found))
            except OutOfReachError:
                raise
            except Exception:  # a proxy of something that is not there
                logger.info("cannot look into a %s", type(value).__name__, exc_info=True)
    return found


def _look_at(value: Any, found: Outside) -> Iterator[Any]:
    """Note what a value holds that can be changed; yield what is to be looked at, too."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, torch.Generator):
        found.generators.append(value)
    elif isinstance(value, torch.Tensor):
        if value.numel() <= _ENOUGH and not (value.is_inference() or value.is_meta):
            found.tensors.append(value)
    elif type(value).__name__ == "ndarray" and value.size <= _ENOUGH:  # told without importing NumPy
        found.arrays.append(value)
    elif isinstance(value, types.GeneratorType):
        raise OutOfReachError(f"{value.__qualname__} is a generator, which cannot be copied")
    elif type(value) in CONTAINERS:
        if len(value) <= _ENOUGH:
            found.containers.append(value)
            yield from value.values() if isinstance(value, Mapping) else value
    elif isinstance(value, REMEMBERING):
        found.remembering.append(value)
        yield value.__wrapped__
    elif (function := _code_of(value)) is not None:
        if is_followed(function):
            yield from _named_by(function, found)
    elif isinstance(value, type):
        if is_followed(value):
            found.places.append(place_of(value))
            yield from (*vars(value).values(), type(value))
    elif isinstance(value, nn.Module):
        numbers = [name for name, one in vars(value).items() if isinstance(one, bool | int | float | str)]
        found.places.append(Place(value, vars(value), vars(value).__setitem__, numbers))
    elif isinstance(value, threading.local | types.SimpleNamespace) or is_an_object(value):
        found.places.append(Place(value, vars(value), vars(value).__setitem__))
        yield from (*vars(value).values(), type(value))


def _named_by(function: types.FunctionType, found: Outside) -> Iterator[Any]:
    """Note where a function may assign; yield what it names, and what its closure and defaults hold."""
    names, everywhere = names_in(function), function.__globals__
    found.names |= names
    cells = filled_cells(function)
    found.cells += cells
    found.places += [place_of(function), Place(None, everywhere, everywhere.__setitem__, names)]
    yield from vars(function).values()
    yield from default_values(function)
    yield from (cell.cell_contents for cell in cells)
    for name in sorted(names):  # sets of names are in another order in each process
        value = everywhere.get(name, sys.modules.get(name))
        if not isinstance(value, types.ModuleType):
            yield value
        elif is_followed(value):
            found.places.append(place_of(value, names))
            yield from (vars(value)[one] for one in sorted(names) if one in vars(value))


def _code_of(value: Any) -> types.FunctionType | None:
    """The Python function in a function, method, property or wrapper of one; None where there is none."""
    for _ in range(_DEPTH):
        if isinstance(value, types.FunctionType):
            return value
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, REMEMBERING):
            value = value.__wrapped__
    return None


def remembering_in(value: Any) -> Any:
    """Return the function that remembers its results in a function or method, as it is kept; else None."""
    function = value.__func__ if type(value) in _METHODS else value
    return function if issubclass(type(function), REMEMBERING) else None


def _is_configuration(value: Any) -> bool:
    is_code = isinstance(value, nn.Module | type | types.FunctionType | types.ModuleType)
    return bool(type(value).__dictoffset__) and not is_code and isinstance(vars(value), dict)


def is_an_object(value: Any) -> bool:
    """Whether a value is an object of somebody's own class."""
    return bool(type(value).__dictoffset__) and is_followed(type(value))


def is_followed(value: Any) -> bool:
    """Whether the code of a module, class or function is looked into: that of a library is not."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] not in _LIBRARIES
