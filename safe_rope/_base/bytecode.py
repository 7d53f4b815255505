"""What the code of a module's class does, told from its bytecode."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_COUNTING = {"arange", "linspace", "logspace", "cumsum", "range", "meshgrid", "ndgrid"}
_WAVES = {"sin", "cos", "polar", "exp", "outer", "einsum", "pow"}


class _Facts(NamedTuple):
    counts: bool
    computes: bool
    stores: bool
    turns: bool
    waves: bool


def counts_in_forward(cls: type) -> bool:
    """Whether a method of ``cls`` other than its constructor, or a function that it calls, makes a count.

    Only functions of the package that defines the class are followed, and methods of torch are not.
    """
    return _facts_of(cls).counts


def computes_positions_in_forward(cls: type) -> bool:
    """Whether such a method makes a count, and takes powers, exponentials, sines or outer products."""
    return _facts_of(cls).computes


def stores_in_forward(cls: type) -> bool:
    """Whether a method of ``cls`` other than its constructor assigns attributes or registers buffers."""
    return _facts_of(cls).stores


def stores_when_called(cls: type) -> bool:
    """Whether ``forward``, or a method that it names, assigns attributes or registers buffers."""
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("torch."):
            own.update(vars(base))
    seen: set[Any] = set()
    waiting = [_function_of(own.get("forward"))]
    while waiting:
        function = waiting.pop()
        if function is None or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = _names(function.__code__)
        stores = (one.opname == "STORE_ATTR" for one in dis.get_instructions(function.__code__))
        if names & {"register_buffer", "setattr", "__dict__", "vars"} or any(stores):
            return True
        waiting += [_function_of(own.get(name)) for name in names]
    return False


def turns_in_forward(cls: type) -> bool:
    """Whether a method of ``cls`` other than its constructor takes sines and cosines."""
    return _facts_of(cls).turns


def makes_waves(cls: type) -> bool:
    """Whether the code of ``cls``, its constructor included, takes sines and cosines of what it counts."""
    return _facts_of(cls).waves


def _facts_of(cls: Any) -> _Facts:
    return _facts(cls)


@functools.lru_cache(maxsize=4096)
def _facts(cls: Any) -> _Facts:
    codes = [function.__code__ for function in _functions(cls, constructors=False)]
    names = set().union(*map(_names, codes))
    stores = "register_buffer" in names or any(
        one.opname == "STORE_ATTR" for code in codes for one in dis.get_instructions(code)
    )
    turns = {"sin", "cos"} <= names or "polar" in names
    everywhere = set().union(*(_names(f.__code__) for f in _functions(cls, constructors=True)))
    counted = everywhere & (_COUNTING | {"array", "range", "tensor", "FloatTensor"})
    waves = bool(counted) and ({"sin", "cos"} <= everywhere or "polar" in everywhere)
    counts = bool(names & _COUNTING)
    return _Facts(counts, counts and bool(names & _WAVES), stores, turns, waves)


def _functions(cls: type, constructors: bool) -> Iterator[types.FunctionType]:
    seen: set[Any] = set()
    waiting: list[types.FunctionType] = []
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, value in vars(base).items():
            function = _function_of(value)
            if function is not None and (constructors or name != "__init__"):
                waiting.append(function)
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function
        scope = vars(sys.modules.get(function.__module__, sys))
        for name in function.__code__.co_names:
            called = _function_of(scope.get(name))
            if called is not None and _package(called) == _package(function):
                waiting.append(called)


def _package(function: types.FunctionType) -> str:
    # Of a library each model is a world of its own; a file of the user's imports from the files beside it.
    name = function.__module__ or ""
    return name if name.startswith("transformers.") else name.partition(".")[0]


def _function_of(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
