"""Run the constructors of modules again, once for all modules that are built with the same arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable
from typing import Any

from torch import nn

from safe_rope._base.by_identity import ByIdentity
from safe_rope._recognition.arguments import Arguments, has_moved
from safe_rope._recognition.conditions import Conditions
from safe_rope._recognition.only_kept import only_kept
from safe_rope._recognition.outside import OutOfReachError, is_followed
from safe_rope._recognition.reference import Again
from safe_rope._recognition.tables import makes_own_waves
from safe_rope._recognition.untouched import Before


class Reruns:
    """What the constructors make that run again, as long as a guard is open."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Arguments, Again]] = {}
        self._before = ByIdentity[nn.Module, tuple[Before, bool]]()
        self._again_of = ByIdentity[nn.Module, tuple[Arguments, Again]]()

    def clear(self) -> None:
        """Forget all of it."""
        self._known.clear()
        self._before.clear()
        self._again_of.clear()

    def note(self, module: nn.Module, frame: Any, arguments: Arguments, conditions: Conditions) -> None:
        """Remember what the constructor of ``module``, in ``frame``, may change before it runs again."""
        if conditions.plain or not makes_own_waves(type(module)):
            return
        if conditions.device == "meta":
            key = key_of(type(module), arguments, conditions)
            if key is not None:  # when it is looked at, a setting that its constructor reads may be another
                again = self.of(module, arguments, conditions, key)
                again.certain &= not (again.moves and has_moved(module, frame))
        elif is_followed(type(module)):
            with contextlib.suppress(OutOfReachError):
                self._before[module] = Before(type(module), arguments.held()), has_moved(module, frame)

    def of(
        self, module: nn.Module, arguments: Arguments, conditions: Conditions | None, key: Hashable | None
    ) -> Again:
        """Return what the constructor of ``module`` makes when it runs again; ``key`` is from `key_of`."""
        kept = only_kept(type(module))
        if key is not None and kept:
            key = key_of(type(module), arguments, conditions, kept)
        known = self._known.get(key) if key is not None else None
        if known is not None and known[1].moves:
            known = self._again_of.get(module)  # another call of the constructor makes something else
        if known is None:
            possible = Conditions.usual() if conditions is None else conditions.variants()
            before, moved = self._before.get(module, (None, False))
            again = Again(type(module), arguments, possible, before)
            again.certain &= not (again.moves and moved)
            known = self._again_of[module] = (arguments, again)
            if key is not None:
                self._known.setdefault(key, known)  # the arguments stay alive, so that ids stay theirs
        own = {} if known[0] is arguments else arguments.kwargs
        numbers = {attribute: own[name] for name, attribute in kept.items() if type(own.get(name)) is int}
        return known[1].of_another(numbers) if numbers else known[1]


def key_of(
    cls: type, arguments: Arguments, conditions: Conditions | None, kept: Collection[str] = ()
) -> Hashable | None:
    """Return what two calls of a constructor that make the same tables have in common."""
    key = arguments.key(kept)
    return None if key is None else (cls, conditions, key)
