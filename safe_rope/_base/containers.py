"""What somebody's containers hold, told by Python's own methods: those of a subclass may run anything.

A lazy mapping, as transformers' of its models, imports what it stands for when it is asked for its values.
Types are asked instead of `isinstance`, which asks an object that stands for another what that is.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

_WEAK = (WeakValueDictionary, WeakKeyDictionary)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, *_WEAK)


@functools.lru_cache(maxsize=4096)
def _container(cls: Any) -> Any:
    """Return which of Python's own containers a class is; None for none."""
    return next((own for own in _CONTAINERS if issubclass(cls, own)), None)


def held_in(value: Any) -> list[Any]:
    """Return what a dictionary, list, tuple, set or deque holds itself; nothing for any other value."""
    own = _container(type(value))  # type: ignore[arg-type]
    if own is None:
        return []
    return list(own.values(value) if own is dict or own in _WEAK else own.__iter__(value))


def length_of(value: Any) -> int:
    """Return how many values a container holds itself; 0 for any other value."""
    own = _container(type(value))  # type: ignore[arg-type]
    return 0 if own is None else own.__len__(value)
