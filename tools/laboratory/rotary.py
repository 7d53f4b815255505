"""The rotary modules of a transformers model, and the cos and sin that they give."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def rotary_modules(model: Any) -> list[Any]:
    """Return the model's rotary modules, told by the names of their classes.

    Raises:
        LookupError: it has none.

    """
    found = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    if not found:
        raise LookupError("the model has no module whose class is a ...RotaryEmbedding; cannot measure it")
    return found


def takes_positions(module: Any) -> bool:
    """Whether a rotary module takes positions, and not only the sequence's length (transformers 4.36)."""
    return "seq_len" not in inspect.signature(module.forward).parameters


@torch.no_grad()
def cos_sin(module: Any, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what ``forward`` gives in FP32: cos and sin, each ``[n, head_dim]``.

    Args:
        module: a rotary module.
        positions: ``[n]``; a module that takes none answers for 0, 1, 2 and so on.

    """
    x = torch.zeros(1, 1, len(positions), 2)
    ask = {"position_ids": positions[None]} if takes_positions(module) else {"seq_len": len(positions)}
    tables = module(x, **ask)
    return tuple(getattr(table, "table", table).reshape(len(positions), -1) for table in tables)
