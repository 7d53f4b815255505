"""The dtypes that training uses."""

from __future__ import annotations

import torch

LOW = (torch.bfloat16, torch.float16)
"""Too small for position tables."""

ROTATED = (*LOW, torch.float32)
"""What q and k may have."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def low_dtype_of(values: torch.Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype that has every one of ``values``; None where neither has."""
    return next((low for low in LOW if torch.equal(values, values.to(low).to(values.dtype))), None)
