"""cos and sin as the stock models compute them in FP32 on CPU, to the bit.

Source: transformers, models/llama/modeling_llama.py, LlamaRotaryEmbedding. Its three forms, an outer product
(4.36), a matrix product over a dimension of one (4.57) and an elementwise product (5.23), round alike.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope._base.devices import kept_on
from safe_rope._base.positions import refuse_too_large
from safe_rope._base.tensors import is_captured

_LARGEST_TABLE = 1 << 18
"""Longer sequences on a device are computed on CPU and copied each time: no table grows without bound."""


class StockLookup:
    """The arithmetic behind StockTable. Thread-safe."""

    def __init__(
        self, inv_freq: tuple[float, ...], attention_scaling: float, position_divisor: float
    ) -> None:
        with torch.inference_mode(False):
            self._inv_freq = originals.tensor(inv_freq, dtype=torch.float32, device="cpu")
        self._attention_scaling = attention_scaling
        self._position_divisor = position_divisor
        self._lock = threading.RLock()
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each contiguous ``[*position_ids.shape, half]``, on position_ids' device."""
        refuse_too_large(position_ids)
        if position_ids.device.type == "cpu":
            cos, sin = self._compute(position_ids)
        elif is_captured(position_ids):
            cos, sin = self._captured(position_ids)
        else:
            cos, sin = self._on_device(position_ids)
        return cos.to(dtype), sin.to(dtype)

    def _on_device(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        smallest, largest = (int(bound) for bound in _bounds(position_ids))
        if smallest < 0 or largest >= _LARGEST_TABLE:
            cos, sin = (part.to(position_ids.device) for part in self._compute(position_ids.cpu()))
        else:
            index = position_ids.to(torch.int64).reshape(-1)
            cos, sin = (
                part.index_select(0, index).view(*position_ids.shape, part.shape[-1])
                for part in self._table(position_ids.device, largest + 1)
            )
        return cos, sin

    def _compute(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phase = self._phase(position_ids, self._inv_freq)
        return self._scaled(phase.cos()), self._scaled(phase.sin())

    def _captured(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for a CUDA graph, which nothing on the host may wait for or copy to.

        What the device's table has no row for is rounded from float64. The phase is that of the CPU; cos and
        sin may be off by one unit in the last place.
        """
        numbers = [position_ids.new_full((), f, dtype=torch.float32) for f in self._inv_freq.tolist()]
        phase = self._phase(position_ids, torch.stack(numbers)).double()
        parts = [self._scaled(part.float()) for part in (phase.cos(), phase.sin())]
        table = self._tables.get(position_ids.device)
        if table is not None:
            index = position_ids.to(torch.int64)
            has_row = (index >= 0) & (index < table[0].shape[0])
            index, has_row = torch.where(has_row, index, 0), has_row[..., None]
            parts = [torch.where(has_row, rows[index], part) for rows, part in zip(table, parts, strict=True)]
        return parts[0], parts[1]

    def _phase(self, position_ids: Tensor, inv_freq: Tensor) -> Tensor:
        positions = position_ids.to(torch.int64).to(torch.float32)
        if self._position_divisor != 1.0:
            positions = positions / self._position_divisor
        return positions[..., None] * inv_freq

    def _scaled(self, part: Tensor) -> Tensor:
        return part if self._attention_scaling == 1.0 else part * self._attention_scaling

    def _table(self, device: torch.device, length: int) -> tuple[Tensor, Tensor]:
        table = self._tables.get(device)
        if table is None or table[0].shape[0] < length:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                table = self._tables.get(device)
                if table is None or table[0].shape[0] < length:
                    rows = 1 << max(length - 1, 1).bit_length()
                    cos, sin = self._compute(originals.arange(rows, dtype=torch.int64, device="cpu"))
                    cos, sin = kept_on(device, (cos, sin))
                    table = self._tables[device] = cos, sin
        return table


def _bounds(position_ids: Tensor) -> tuple[Tensor, Tensor] | tuple[int, int]:
    if position_ids.numel() == 0:
        return 0, 0
    smallest, largest = position_ids.to(torch.int64).aminmax()
    return smallest, largest
