"""The dtypes that training uses."""

from __future__ import annotations

import torch

LOW = (torch.bfloat16, torch.float16)
"""Too small for position tables."""

ROTATED = (*LOW, torch.float32)
"""What q and k may have."""
