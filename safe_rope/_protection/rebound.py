"""Lead what wraps a module's own ``forward`` to the one that its class has now.

Hooks of accelerate, profilers and patches by hand put a function into the module itself. It holds the bound
method of the class that the module had then.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from safe_rope._base.functions import filled_cells

_DEEPEST = 4
"""Wrappers around one another that are looked into."""


def lead_to_its_class(module: nn.Module, before: type, holder: nn.Module | None = None) -> None:
    """Have what calls a module's ``forward`` of the class ``before`` call that of the class it has now.

    ``holder`` is the module that keeps what calls it, by default itself.
    """
    own = vars(module if holder is None else holder)
    for name, value in list(own.items()):
        if callable(value) and (led := _led(value, module, before, _DEEPEST)) is not value:
            own[name] = led


def _led(value: Any, module: nn.Module, before: type, depth: int) -> Any:
    """Return what takes the place of ``value``: itself, where it is changed inside or needs no change."""
    if isinstance(value, types.MethodType):
        stale = getattr(before, "forward", None)
        if value == stale or (value.__self__ is module and value.__func__ is stale):
            return types.MethodType(type(module).forward, module)
        name = value.__func__.__name__
        is_other = value.__self__ is module and getattr(before, name, None) is value.__func__
        return getattr(type(module), name).__get__(module) if is_other else value
    if depth == 0 or not callable(value) or isinstance(value, type | nn.Module):
        return value
    if isinstance(value, functools.partial):
        parts = value.func, *value.args
        function, *args = (_led(part, module, before, depth - 1) for part in parts)
        if any(map(operator.is_not, (function, *args), parts)):
            attributes = vars(value)
            value = functools.partial(function, *args, **value.keywords)
            vars(value).update(attributes)
    for held, put in _held(value):
        if (led := _led(held, module, before, depth - 1)) is not held:
            put(led)
    return value


def _held(value: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Yield what a function or an object that is called holds, each with what puts another in its place."""
    for cell in filled_cells(value):
        yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, held in list(attributes.items()):
            yield held, functools.partial(operator.setitem, attributes, name)
