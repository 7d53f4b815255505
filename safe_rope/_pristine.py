"""FP32 vectors that nothing outside can redirect.

``deepspeed.zero.Init`` replaces ``torch.arange``, ``torch.tensor`` and six other constructors while it is
open, ``torch.device`` as a context redirects every factory, and the default dtype decides what an untyped
number becomes. ``torch.frombuffer`` reads memory that already exists, so none of the three reaches it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch


def float32_vector(values: Iterable[float]) -> torch.Tensor:
    """Return ``values``, each rounded once to FP32, as a CPU tensor ``[len(values)]`` that owns its memory.

    Integers below 2**53 are rounded as ``torch.arange(..., dtype=torch.int64).float()`` rounds them.

    Raises:
        ValueError: ``values`` is empty (a buffer cannot be).

    """
    return torch.frombuffer(array("d", values), dtype=torch.float64).to(torch.float32)
