"""What the calls of a kept module show of its phases: those that it was given, and one of a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from safe_rope._audit.computed import alone, asked, ways
from safe_rope._base import bytecode
from safe_rope._base.dtypes import LOW, dtype_name
from safe_rope._protection.rewrite import is_kept, is_pinned, state_of
from safe_rope._protection.running import rounded_in_graphs
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.explained import AS_STOCK, DRAWN, LOW_PHASES
from safe_rope._recognition.provenance import Provenance
from safe_rope._recognition.reference import stock_class
from safe_rope.rotation._cos_sin import low_phases


def shown_by_calls(module: nn.Module, dtype: torch.dtype, is_compiled: bool) -> Iterator[tuple[str, str]]:
    """Yield what a kept module computes as the stock model does, by name.

    Args:
        module: any module.
        dtype: what its activations have.
        is_compiled: whether it is part of what is compiled, where nothing follows its frequencies.

    """
    if not is_kept(module):
        return
    notes: dict[str, str] = state_of(module).notes
    followed = rounded_in_graphs(module) if is_pinned(module) and dtype in LOW else []
    if is_compiled:
        said = f"it meets weights of {dtype_name(dtype)} in a graph, where phases are rounded"
        yield from ((name, f"{said} as in the stock model") for name in followed)
    elif followed and "phases" not in notes and _rounds(module, dtype):
        yield "phases", LOW_PHASES
    yield from ((name, note) for name, note in notes.items() if note in AS_STOCK or note == DRAWN)


def _rounds(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a copy of a module rounds phases when it is called, if anybody knows how to call it."""
    stock: Any = stock_class(module)
    if not bytecode.facts(stock).turns or bytecode.talks_to_ranks(stock):
        return False
    for arguments, _ in ways(module):
        told = low_phases()
        try:
            asked(alone(module), arguments(dtype), 0, Provenance())
        except UnansweredError as error:
            if isinstance(error.__cause__, RecursionError):
                break
            continue
        return low_phases() != told
    return False
