"""cos and sin at positions that are no integers: somebody interpolates, or counts in a floating dtype."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from safe_rope._base.dtypes import LOW
from safe_rope.errors import PrecisionWarning
from safe_rope.tables import RotaryTable, StockTable


def lookup(table: RotaryTable | StockTable, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP32 cos and sin of every phase, times the table's scaling.

    Args:
        table: whose frequencies and factors count.
        position_ids: positions of any real dtype, any shape ``[...]``, any device.
    """
    if isinstance(position_ids, Tensor) and position_ids.dtype == torch.bool:
        position_ids = position_ids.to(torch.int64)
    if not isinstance(position_ids, Tensor) or not position_ids.is_floating_point():
        return table.lookup(position_ids)
    if position_ids.dtype in LOW and not torch.compiler.is_compiling():
        warnings.warn(
            f"position_ids arrive in {position_ids.dtype}, which rounds integers above 256 (float16: 2048): "
            "make them with torch.arange(..., dtype=torch.int64)",
            PrecisionWarning,
            stacklevel=2,
        )
    return table.evaluate(position_ids.detach())
