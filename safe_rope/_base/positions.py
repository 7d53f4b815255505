"""What position_ids may be."""

from __future__ import annotations

import torch
from torch import Tensor

from safe_rope._base.torch_private import (
    count_dispatch_modes,
    innermost_transform,
    tracing_state,
)

_INTEGERS = frozenset(
    {
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)
_OUTPUTS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def check_arguments(position_ids: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless position_ids is an integer tensor and dtype one that cos and sin can have."""
    if not isinstance(position_ids, Tensor):
        raise TypeError(
            f"position_ids must be an integer tensor, got {type(position_ids).__name__}; "
            "make one with torch.tensor(..., dtype=torch.int64)"
        )
    if position_ids.dtype not in _INTEGERS:
        raise TypeError(
            f"position_ids must be an integer tensor, got {position_ids.dtype}; a position is exact only "
            "as an integer: build it with torch.arange(..., dtype=torch.int64) or convert it to torch.int64"
        )
    if dtype not in _OUTPUTS:
        raise TypeError(
            f"dtype must be torch.float64, float32, bfloat16 or float16, got {dtype}; "
            "ask for torch.float32 and convert the result"
        )


def refuse_too_large(position_ids: Tensor) -> None:
    """Raise ValueError for a uint64 on CPU that no int64 holds."""
    if position_ids.dtype == torch.uint64 and position_ids.is_cpu and position_ids.numel():
        smallest = int(position_ids.to(torch.int64).min())
        if smallest < 0:
            raise ValueError(f"position_ids must be below 2**63, got {smallest + 2**64}; use int64 positions")


def must_stay_opaque(position_ids: Tensor) -> bool:
    """Whether somebody records what happens, so that the lookup has to be one operator."""
    return (
        torch.compiler.is_compiling()
        or (type(position_ids) is not Tensor and isinstance(position_ids, Tensor))
        or (isinstance(position_ids, Tensor) and position_ids.is_meta)
        or count_dispatch_modes() > 0
        or tracing_state() is not None
    )


def is_watched() -> bool:
    """Whether somebody records or transforms what this thread does: nothing of it may be kept."""
    # A module asks several times in each forward.
    return (
        torch.compiler.is_compiling()
        or count_dispatch_modes() > 0
        or tracing_state() is not None
        or innermost_transform() is not None
    )
