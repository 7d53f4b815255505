"""Values by the identity of objects that are held weakly: an entry goes when its key goes.

A module that is being built has no usable hash yet, and may define what it is equal to. Every module that a
guard sees is asked for many times: a lookup makes no object.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Other = TypeVar("Other")


class _Reference(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("number",)
    number: int


class ByIdentity(MutableMapping[Key, Value]):
    """A mapping that neither hashes nor compares its keys."""

    def __init__(self) -> None:
        held: dict[int, tuple[_Reference, Value]] = {}

        def forget(reference: Any) -> None:
            found = held.get(reference.number)
            if found is not None and found[0] is reference:
                del held[reference.number]

        self._held, self._forget = held, forget

    def __setitem__(self, key: Key, value: Value) -> None:
        found = self._held.get(id(key))
        if found is not None and found[0]() is key:
            reference = found[0]
        else:
            reference = _Reference(key, self._forget)
            reference.number = id(key)
        self._held[id(key)] = reference, value

    def __getitem__(self, key: Key) -> Value:
        reference, value = self._held[id(key)]
        if reference() is not key:
            raise KeyError(key)
        return value

    def get(self, key: Key, default: Other = None) -> Value | Other:  # type: ignore[assignment]
        """Return the value of ``key``, or ``default``."""
        found = self._held.get(id(key))
        return default if found is None or found[0]() is not key else found[1]

    def pop(self, key: Key, default: Other = None) -> Value | Other:  # type: ignore[assignment]
        """Take ``key`` out and return its value, or ``default``."""
        found = self._held.get(id(key))
        if found is None or found[0]() is not key:
            return default
        self._held.pop(id(key), None)  # another thread may have cleared it meanwhile
        return found[1]

    def setdefault(self, key: Key, default: Value) -> Value:
        """Return the value of ``key``, which gets ``default`` where it has none."""
        found = self._held.get(id(key))
        if found is None or found[0]() is not key:
            self[key] = default
            return default
        return found[1]

    def __contains__(self, key: object) -> bool:
        found = self._held.get(id(key))
        return found is not None and found[0]() is key

    def __delitem__(self, key: Key) -> None:
        self[key]
        del self._held[id(key)]

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys that are alive; other threads may add to them meanwhile."""
        held = list(self._held.values())
        return (key for reference, _ in held if (key := reference()) is not None)

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)
