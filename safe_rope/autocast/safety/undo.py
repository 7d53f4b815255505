"""Put back the real memory that a traced forward writes to, and the generators that it draws from."""

from __future__ import annotations

from typing import Any

import torch

from safe_rope._base.tensors import tensors
from safe_rope._base.torch_private import storage_key
from safe_rope.autocast.safety import moves
from safe_rope.autocast.safety.parameters import WeakStorage, storage_of


class Undo:
    """Copies of the storages that existed before and were written to; `restore` writes them back.

    Not ``active`` where tensors hold no memory, so that there is nothing to put back but generators.
    """

    def __init__(self, active: bool) -> None:
        self._active = active
        self._made: dict[int, Any] = {}  # weak references, so that no key is used again
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._generators: dict[torch.Generator, Any] = {}

    def before(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Save what the operator is about to write to, unless the trace itself made it."""
        generator = keywords.get("generator")
        if generator is not None and generator not in self._generators:
            self._generators[generator] = generator.get_state()
        if self._active and func._schema.is_mutable:
            for storage in filter(None, map(storage_of, moves.written(func, args, keywords))):
                key = storage_key(storage)
                if key not in self._made and key not in self._saved:
                    self._saved[key] = (storage, storage.clone())

    def after(self, func: Any, result: Any) -> None:
        """Remember the storages that an operator made."""
        if self._active and not any(returned.alias_info for returned in func._schema.returns):
            for storage in filter(None, map(storage_of, tensors(result))):
                key = storage_key(storage)
                if key not in self._made:
                    self._made[key] = WeakStorage(storage)

    def restore(self) -> None:
        """Write the saved values back."""
        for storage, saved in self._saved.values():
            storage.copy_(saved)
        self._saved.clear()
        for generator, state in self._generators.items():
            generator.set_state(state)
        self._generators.clear()
