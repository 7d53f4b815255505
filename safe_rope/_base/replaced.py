"""Attributes of foreign objects that something of ours stands in the place of."""

from __future__ import annotations

from typing import Any

_NOTHING = object()


class Replaced:
    """What was replaced, and by what; put back, unless somebody else has replaced it meanwhile."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._done)

    def __contains__(self, value: Any) -> bool:
        """Whether ``value`` stands in the place of something."""
        return any(ours is value for *_, ours in self._done)

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Let ``ours`` stand where ``owner`` itself, not a base of it, has ``name`` or could have it."""
        self._done.append((owner, name, vars(owner).get(name, _NOTHING), ours))
        setattr(owner, name, ours)

    def put_back(self, moved: tuple[str, ...] = ()) -> None:
        """Undo every `put`, the last one first; what had a name in ``moved`` may have another of them now."""
        while self._done:
            owner, name, before, ours = self._done.pop()
            for place in moved if name in moved else (name,):
                if vars(owner).get(place) is not ours:
                    continue
                if before is _NOTHING:
                    delattr(owner, place)
                else:
                    setattr(owner, place, before)
