"""Tensor constructors that nobody has replaced.

``deepspeed.zero.Init`` puts wrappers in the place of ``torch.empty`` and its siblings. The functions below
are the C++ bindings that those names came from. They are the originals even if this module is first imported
while a wrapper stands in front of them. Call them with an explicit ``dtype`` and ``device``: then neither the
default dtype nor a ``torch.device`` context has a say.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import torch

from safe_rope._base.torch_private import TRUE_CONSTRUCTORS

arange: Callable[..., torch.Tensor] = TRUE_CONSTRUCTORS.arange
empty: Callable[..., torch.Tensor] = TRUE_CONSTRUCTORS.empty
tensor: Callable[..., torch.Tensor] = TRUE_CONSTRUCTORS.tensor


def vector(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
    """Return ``values``, each rounded once to ``dtype``, as a CPU tensor ``[len(values)]`` with fresh memory.

    ``torch.frombuffer`` reads memory that already exists, so that no context redirects it. Integers below
    2**53 are rounded as ``torch.arange(..., dtype=torch.int64).float()`` rounds them.

    Raises:
        ValueError: ``values`` is empty (a buffer cannot be).
    """
    return torch.frombuffer(array("d", values), dtype=torch.float64).to(dtype)
