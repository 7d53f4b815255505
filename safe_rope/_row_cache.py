"""Whole tables [length, rotary_dim] for modules that are called with a length, shared by all layers."""

from __future__ import annotations

import threading
import weakref

import torch

from safe_rope._originals import arange
from safe_rope.tables import RotaryTable, StockTable

_lock = threading.Lock()
_caches: weakref.WeakValueDictionary[tuple[str, int, str], RowCache] = weakref.WeakValueDictionary()


class RowCache:
    """cos and sin for positions 0 to length - 1: one copy a device, for every module that asks for them."""

    def __init__(self, table: RotaryTable | StockTable, length: int, layout: str) -> None:
        self.table = table
        self.length = length
        self.layout = layout
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor, tuple[int, int]]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return FP32 cos and sin, each [length, rotary_dim], on ``device``; always the same two tensors."""
        with _lock:
            known = self._on.get(device)
            # A write into the shared rows would damage every layer: notice it and build them again.
            if known is None or known[2] != (known[0]._version, known[1]._version):
                cos, sin = self._build(device)
                known = self._on[device] = (cos, sin, (cos._version, sin._version))
            return known[0], known[1]

    def _build(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            positions = arange(self.length, dtype=torch.int64, device="cpu")
            cos, sin = self.table.lookup(positions)
            if self.layout == "half":
                cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
            else:
                cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
            return cos.to(device), sin.to(device)

    def __reduce__(self) -> tuple[object, ...]:
        return shared_rows, (self.table, self.length, self.layout)


def shared_rows(table: RotaryTable | StockTable, length: int, layout: str) -> RowCache:
    """Return the process-wide `RowCache` of ``table`` for ``length`` positions."""
    key = (table.key, length, layout)
    with _lock:
        cache = _caches.get(key)
        if cache is None:
            cache = _caches[key] = RowCache(table, length, layout)
        return cache
