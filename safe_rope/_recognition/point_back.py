"""Have what a module keeps lead to it, where a forward has put a reference to its stand-in there.

A forward that chooses an implementation at its first call keeps a bound method, or a closure over ``self``.
It may be a hook, a default value, in ``__slots__``, or known by a weak reference.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
import weakref
from typing import Any

from torch import nn

from safe_rope._base.functions import filled_cells
from safe_rope._base.methods import package
from safe_rope._recognition.holdings import OF_TORCH, has_slots, slots

_DEEPEST = 4
_LONGEST = 256


def point_back(module: nn.Module, other: nn.Module) -> bool:
    """Replace ``other`` by ``module`` in what the module and those in it keep; say whether it was there."""
    pointer = _Pointer(module, other)
    for one in module.modules():
        held = vars(one)
        for name, value in list(held.items()):
            is_own = name not in OF_TORCH or name.endswith("hooks")
            if is_own and (now := pointer.led(value)) is not value:
                held[name] = now
        pointer.lead_slots(one)
    return pointer.found


class _Pointer:
    def __init__(self, module: nn.Module, other: nn.Module) -> None:
        self.module, self.other, self.found = module, other, False
        self._author = package(type(module).__module__)
        self._seen: set[int] = set()

    def led(self, value: Any, depth: int = 0) -> Any:
        """Return ``value``, or what stands for it where it cannot be changed itself."""
        if value is self.other:
            self.found = True
            return self.module
        cls = type(value)
        if depth > _DEEPEST or (id(value) in self._seen and cls is not types.MethodType):
            return value
        if cls is types.MethodType:
            owner = self.led(value.__self__, depth + 1)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if cls is weakref.WeakMethod or cls is weakref.ref:
            held = value()
            now = self.led(held, depth + 1)
            return value if now is held else cls(now)
        if cls is functools.partial:
            func, args, _ = self.led((value.func, value.args, value.keywords), depth)
            is_same = func is value.func and args is value.args
            return value if is_same else functools.partial(func, *args, **value.keywords)
        if cls in (tuple, set, frozenset):
            items = [self.led(one, depth + 1) for one in itertools.islice(value, _LONGEST)]
            if all(map(operator.is_, items, value)):
                return value
            return cls([*items, *itertools.islice(value, _LONGEST, None)])
        self._seen.add(id(value))
        if cls is types.FunctionType:
            for cell in filled_cells(value):
                if (now := self.led(cell.cell_contents, depth + 1)) is not cell.cell_contents:
                    cell.cell_contents = now
            if (defaults := self.led(value.__defaults__, depth)) is not value.__defaults__:
                value.__defaults__ = defaults
            self.led(value.__kwdefaults__, depth)
        elif issubclass(cls, dict) or (_has_own(cls) and package(cls.__module__) == self._author):
            held = value if issubclass(cls, dict) else getattr(value, "__dict__", {})
            for key, one in list(held.items())[:_LONGEST]:
                if (now := self.led(one, depth + 1)) is not one:
                    held[key] = now
            self.lead_slots(value, depth + 1)
        elif issubclass(cls, list):
            for at, one in enumerate(value[:_LONGEST]):
                if (now := self.led(one, depth + 1)) is not one:
                    value[at] = now
        return value

    def lead_slots(self, owner: Any, depth: int = 0) -> None:
        """Have the ``__slots__`` of a module, or of what it keeps, lead to the module."""
        for name in slots(owner):
            value = getattr(owner, name)
            if (now := self.led(value, depth)) is not value:
                object.__setattr__(owner, name, now)


def _has_own(cls: Any) -> bool:
    return not issubclass(cls, nn.Module | type) and bool(cls.__dictoffset__ or has_slots(cls))
