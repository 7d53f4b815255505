"""Put back what a traced forward writes to, where it runs on real memory."""

from __future__ import annotations

from typing import Any

import torch

from safe_rope.autocast.safety import moves
from safe_rope.autocast.safety.parameters import WeakStorage


class Undo:
    """Copies of the storages that existed before and were written to; `restore` writes them back.

    Args:
        active: false where tensors hold no memory, so that there is nothing to put back.

    """

    def __init__(self, active: bool) -> None:
        self._active = active
        self._made: dict[int, Any] = {}
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Save what the operator is about to write to, unless the trace itself made it."""
        if not self._active or not func._schema.is_mutable:
            return
        for tensor in moves.written(func, args, keywords):
            storage = _storage(tensor)
            if storage is None or storage._cdata in self._saved:
                continue
            made = self._made.get(storage._cdata)
            if made is None or made.expired():
                self._saved[storage._cdata] = (storage, _copy(storage))

    def after(self, func: Any, result: Any) -> None:
        """Remember the storages that an operator made."""
        if not self._active or any(returned.alias_info for returned in func._schema.returns):
            return
        for tensor in moves.tensors(result):
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in self._made:
                self._made[storage._cdata] = WeakStorage(storage)

    def restore(self) -> None:
        """Write the saved values back."""
        for storage, saved in self._saved.values():
            storage.copy_(saved)
        self._saved.clear()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _copy(storage: Any) -> torch.UntypedStorage:
    copied: torch.UntypedStorage = storage.clone()
    return copied
