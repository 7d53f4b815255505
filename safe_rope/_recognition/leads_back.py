"""Whether what a module holds leads back to it: a hook, a bound method, a closure, a child that knows it.

So does a global list or dictionary that has it and that its forward names.

What is assigned through such a reference lands in the module itself, and not in a copy that stands in for it.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from safe_rope._base.containers import held_in
from safe_rope._base.functions import filled_cells
from safe_rope._base.methods import named_by_forward, package
from safe_rope._recognition.reference import stock_class

_KEEPERS = (
    nn.Module,
    weakref.ref,
    dict,
    list,
    tuple,
    set,
    deque,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
_ENOUGH = 4096
"""Values that are looked at."""


class Back(enum.Enum):
    """How a module is reached from what it holds."""

    NOT = enum.auto()
    COPIED = enum.auto()
    """Through what `copy.deepcopy` copies: from a copy of the module they lead to the copy."""
    SHARED = enum.auto()
    """Also through a closure, a weak reference or a global: from a copy they lead to the module itself."""


def leads_back(module: nn.Module) -> Back:
    """Return how what ``module`` and the modules in it hold leads back to it.

    Objects and functions are looked into where they are of the package that the module's class is from. An
    engine puts its methods into every module, and its hooks know all of them.
    """
    found, seen = Back.NOT, set[tuple[int, bool]]()
    author = package(type(module).__module__)
    kept = (item for one in module.modules() for item in vars(one).items())
    waiting = [(value, False) for name, value in kept if name != "forward"]  # which wraps the class's
    waiting += [
        (value, True) for value in named_by_forward(stock_class(module)) if isinstance(value, _KEEPERS)
    ]
    while waiting and len(seen) < _ENOUGH:
        value, is_shared = waiting.pop()
        if value is module:
            found = Back.SHARED if is_shared else Back.COPIED
            if is_shared:
                break
        elif (id(value), is_shared) not in seen and not isinstance(value, nn.Module):
            seen.add((id(value), is_shared))
            waiting += [(one, is_shared or shares) for one, shares in _held(value, author)]
    return found


def _held(value: Any, author: str) -> Iterator[tuple[Any, bool]]:
    """Yield what a value holds, and whether copies of the value hold the same."""
    if held := held_in(value):
        yield from ((one, False) for one in held)
    elif isinstance(value, weakref.WeakValueDictionary | weakref.WeakSet):
        yield from ((one, False) for one in list(getattr(value, "values", value.__iter__)()))
    elif isinstance(value, weakref.ref):
        yield value(), True
    elif isinstance(value, functools.partial):
        if _is_of(value.func, author):
            yield from ((one, False) for one in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        if _is_of(value, author) and value.__name__ != "forward":  # which nobody calls inside itself
            yield from ((one, False) for one in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        if _is_of(value, author):
            yield from ((cell.cell_contents, True) for cell in filled_cells(value))
    elif _is_of(type(value), author):
        yield from ((one, False) for one in getattr(value, "__dict__", {}).values())


def _is_of(defined: Any, author: str) -> bool:
    return package(getattr(defined, "__module__", None)) == author
