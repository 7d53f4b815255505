"""The functions of a class: its methods and properties, its constructors, and what they reach.

Only functions of the package that defines a class are followed, and methods of torch are not.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from safe_rope._base import instructions

INITIALISING = (
    "_init_weights",
    "_initialize_weights",
    "init_weights",
    "initialize_weights",
    "reset_parameters",
)
"""Methods that write what a module is to begin with."""
_ANNOTATING = ("__annotate__", "__annotate_func__")
"""What CPython from 3.14 on makes the annotations of a class with."""
CONSTRUCTORS = ("__init__", "_old_init")  # zero.Init keeps what it has replaced under the other name


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each attribute of a class and of its bases, but for those of torch."""
    for base in bases(cls):
        held = tuple(vars(base).items())  # another thread may add an attribute
        yield from ((name, value) for name, value in held if name not in _ANNOTATING)


def bases(cls: type) -> Iterator[type]:
    """Yield a class and its bases but for those of torch."""
    return (base for base in cls.__mro__ if not base.__module__.startswith("torch.") and base is not object)


def by_name(cls: type) -> dict[str, Any]:
    """Return the attributes of a class and of its bases by name, but for those of torch."""
    return dict(reversed([*members(cls)]))


@functools.lru_cache(maxsize=4096)
def methods_of(cls: type, *, with_initialising: bool = True) -> tuple[types.FunctionType, ...]:
    """The methods of a class but its constructor, and the functions that they reach.

    Those that initialise a module which they are given may be left out.
    """
    values = (
        value
        for name, value in members(cls)
        if name not in CONSTRUCTORS
        and (with_initialising or name not in INITIALISING or not takes_another(value))
    )
    return tuple(reached(map(function_behind, values)))


def constructing(cls: type) -> list[types.FunctionType]:
    """The constructors of a class and its bases, and the methods and functions that help them."""
    values = (value for name, value in members(cls) if name in CONSTRUCTORS)
    return list(reached((one for value in values for one in functions_behind(value)), by_name(cls)))


def methods_by_name(cls: type) -> dict[str, list[types.FunctionType]]:
    """The methods and properties of a class and its bases that take an object, but for constructors."""
    found: dict[str, list[types.FunctionType]] = {}
    for name, value in members(cls):
        if name not in CONSTRUCTORS and not isinstance(value, staticmethod):
            found.setdefault(name, []).extend(functions_behind(value))
    return found


def everything(cls: type, methods: tuple[types.FunctionType, ...]) -> list[types.FunctionType]:
    """The methods of a class, and its constructor with the functions that it reaches."""
    constructors = (function_behind(value) for name, value in members(cls) if name in CONSTRUCTORS)
    return [*methods, *reached(constructors, seen=methods)]


@functools.lru_cache(maxsize=4096)
def reached_by_forward(cls: type) -> tuple[types.FunctionType, ...]:
    """Return the functions of ``forward``, the methods that it names, and the functions that help them."""
    own = by_name(cls)
    return tuple(reached(functions_behind(own.get("forward")), own))


def named_by_forward(cls: type) -> Iterator[Any]:
    """Yield what ``forward``, and what helps it, name: in their files, or on the class."""
    for function in reached_by_forward(cls):
        yield from named_in(function)
        yield from (value for name, value in members(cls) if name in names_in(function))


def called_by_forward(cls: type) -> Iterator[types.FunctionType]:
    """Yield ``forward``, the functions of properties, which it may read, and what they call."""
    values = [
        value
        for name, value in members(cls)
        if name == "forward" or not isinstance(value, types.FunctionType | staticmethod | classmethod)
    ]
    return reached((one for value in values for one in functions_behind(value)), by_name(cls))


def maybe_called_by_forward(cls: type) -> Iterator[types.FunctionType]:
    """Yield what forward and properties call, and what has the same names in the bases."""
    called = [*called_by_forward(cls)]
    names = all_names(called)
    also = [one for name, every in methods_by_name(cls).items() if name in names for one in every]
    return reached([*called, *also], by_name(cls))


def takes_another(value: Any) -> bool:
    """Whether a method takes something besides its object."""
    function = function_behind(value)
    return function is not None and function.__code__.co_argcount > 1


def reached(
    functions: Iterable[types.FunctionType | None],
    own: Mapping[str, Any] = MappingProxyType({}),
    *,
    beside: bool = True,
    seen: Iterable[types.FunctionType] = (),
) -> Iterator[types.FunctionType]:
    """Yield functions, the methods among ``own`` that they name, and the functions ``beside`` them.

    None is passed over, and so is what has been ``seen``.
    """
    known = {function.__code__ for function in seen}
    waiting = [function for function in functions if function is not None]
    while waiting:
        function = waiting.pop()
        if function.__code__ in known:
            continue
        known.add(function.__code__)
        yield function
        for value in (own[name] for name in names_in(function) if name in own):
            waiting += (one for one in functions_behind(value) if _is_beside(one, function))
        called = [called_beside(function, value) for value in named_in(function)] if beside else []
        waiting += [one for one in called if one is not None]


def called_beside(function: types.FunctionType, value: Any) -> types.FunctionType | None:
    """The function that a value is, if it is one of the package of another; None if it is not."""
    called = function_behind(value)
    return called if called is not None and _is_beside(called, function) else None


def _is_beside(called: types.FunctionType, function: types.FunctionType) -> bool:
    return package(called.__module__) == package(function.__module__)


def named_in(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function names in its file, and in the files beside it that it names."""
    own, names = vars(sys.modules.get(function.__module__, sys)), names_in(function)
    found = [own[name] for name in names if name in own]
    yield from found
    for module in found:
        if isinstance(module, types.ModuleType) and package(module.__name__) == package(function.__module__):
            yield from (value for name in names if (value := vars(module).get(name)) is not None)


def helpers(functions: list[types.FunctionType]) -> Iterator[type]:
    """Yield the classes of the same package that functions name, and that are no ``nn.Module``."""
    for function in functions:
        for cls in named_in(function):
            if not isinstance(cls, type) or package(cls.__module__) != package(function.__module__):
                continue
            if not any(base.__module__.startswith("torch.") for base in cls.__mro__):
                yield cls


@functools.lru_cache(maxsize=4096)
def package(name: str | None) -> str:
    """What a Python module is a part of: its package, or the folder of a file that is in none."""
    name = name or ""
    if name.startswith("transformers."):
        return name  # of a library each model is a world of its own
    module = sys.modules.get(name)
    file = None if "." in name or hasattr(module, "__path__") else getattr(module, "__file__", None)
    return name.partition(".")[0] if file is None else os.path.dirname(os.path.abspath(file))


def functions_behind(value: Any) -> list[types.FunctionType]:
    """The functions that a method or property runs, one for each type that it is told apart by."""
    values = [value.func if isinstance(value, functools.partialmethod) else value]
    if isinstance(value, functools.singledispatchmethod):
        values = list(value.dispatcher.registry.values())
    return [function for one in values if (function := function_behind(one)) is not None]


def function_behind(value: Any) -> types.FunctionType | None:
    """The function that a method or property runs; None where there is none."""
    try:
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
    except Exception:  # noqa: BLE001 - what stands for an optional import raises what it likes
        return None
    return value if isinstance(value, types.FunctionType) else None


def names_in(function: types.FunctionType) -> frozenset[str]:
    """As `names_of`, of a function."""
    return names_of(function.__code__)


def all_names(functions: Iterable[types.FunctionType]) -> set[str]:
    """Names in any of the functions."""
    return set().union(*map(names_in, functions))


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Names of the globals and attributes in code, and in the functions in it."""
    return frozenset(code.co_names).union(*map(names_of, instructions.inner(code)))
