"""Whole tables [length, rotary_dim] for modules that are called with a length, shared by all layers."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from safe_rope._base.devices import kept_on
from safe_rope._base.originals import arange
from safe_rope._base.torch_private import is_dispatched, undispatched
from safe_rope.tables import RotaryTable, StockTable

_lock = threading.RLock()
_thread = threading.local()
_caches: weakref.WeakValueDictionary[tuple[str, int, str], RowCache] = weakref.WeakValueDictionary()


Rows = tuple[torch.Tensor, torch.Tensor]


class RowCache:
    """cos and sin for positions 0 to length - 1, for every module that asks for the same.

    Two copies a device: one that only ``forward`` reads, and one that modules show as their buffers, where
    outside code can write to it (through ``.data`` even unnoticed).
    """

    def __init__(self, table: RotaryTable | StockTable, length: int, layout: str) -> None:
        self.table = table
        self.length = length
        self.layout = layout
        self._private: dict[torch.device, Rows] = {}
        self._shown: dict[tuple[torch.device, int], torch.Tensor] = {}

    def on(self, device: torch.device) -> Rows:
        """Return FP32 cos and sin, each [length, rotary_dim], on ``device``; always the same two tensors."""
        with _lock, _unobserved():
            return self._rows(device)

    def shown(self, device: torch.device, index: int) -> torch.Tensor:
        """Return a copy of ``on(device)[index]`` to show as a buffer; always the same until written to."""
        with _lock, _unobserved():
            rows, shown = self._rows(device)[index], self._shown.get((device, index))
            checked = getattr(_thread, "checked", None)
            if shown is not None and checked is not None and any(shown is known for known in checked):
                return shown
            if shown is None or _differ(shown, rows):
                with torch.inference_mode(False), torch.no_grad():
                    shown = self._shown[device, index] = rows.clone()
            if checked is not None:
                checked.append(shown)
            return shown

    def _rows(self, device: torch.device) -> Rows:
        known = self._private.get(device)
        if known is None:
            known = self._private.setdefault(device, self._build(device))
        return known

    def _build(self, device: torch.device) -> Rows:
        with torch.inference_mode(False), torch.no_grad():
            positions = arange(self.length, dtype=torch.int64, device="cpu")
            cos, sin = self.table.lookup(positions)
            if self.layout == "half":
                cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
            else:
                cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
            cos, sin = kept_on(device, (cos, sin))
            return cos, sin

    def __reduce__(self) -> tuple[object, ...]:
        return shared_rows, (self.table, self.length, self.layout)


@contextlib.contextmanager
def checked_once() -> Iterator[None]:
    """Compare what modules show with what is right once for all modules of a loop, not once for each."""
    before = getattr(_thread, "checked", None)
    _thread.checked = []
    try:
        yield
    finally:
        _thread.checked = before


def _unobserved() -> contextlib.AbstractContextManager[Any]:
    # What the whole process keeps must be no fake tensor, even if it is asked for while a model is traced.
    if is_dispatched() and not torch.compiler.is_compiling():
        return undispatched()
    return contextlib.nullcontext()


def _differ(shown: torch.Tensor, rows: torch.Tensor) -> bool:
    # Asked when a module's buffers are placed, which is seldom, so that an accelerator may be waited for.
    return shown.dtype != rows.dtype or not (shown.is_meta or torch.equal(shown, rows))


def shared_rows(table: RotaryTable | StockTable, length: int, layout: str) -> RowCache:
    """Return the process-wide `RowCache` of ``table`` for ``length`` positions."""
    key = (table.key, length, layout)
    with _lock:
        cache = _caches.get(key)
        if cache is None:
            cache = _caches[key] = RowCache(table, length, layout)
        return cache
