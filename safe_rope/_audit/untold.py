"""Tables that no constructor tells, told by their numbers alone to be rounded, or to be none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from safe_rope._base import bytecode, changes
from safe_rope._base.dtypes import dtype_name, low_dtype_of
from safe_rope._base.tensors import in_real_numbers
from safe_rope._protection.frozen import random_tables
from safe_rope._protection.rewrite import is_kept
from safe_rope._recognition.explained import is_cast
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import Reference, stock_class
from safe_rope._recognition.tables import (
    has_position_name,
    is_frequency,
    is_seldom_position,
    is_state,
    may_be_filled_with_positions,
    own_tensors,
)
from safe_rope.rotation import plain

_NOTHING = 1e-30
"""A number of no formula is smaller, or larger than its reciprocal."""
_FEWEST = 4


def untold_tables(module: nn.Module, reference: Reference) -> Iterator[tuple[str, str]]:
    """Yield the name of each such table, and what its numbers say."""
    yield from _rounded_or_empty(module)
    yield from _of_one_number(module, reference)


def _rounded_or_empty(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the tables that no constructor gives again and whose numbers are rounded, or are none."""
    for found in random_tables(module):
        owner, _, name = found.name.rpartition(".")
        holder = module.get_submodule(owner)
        held: Any = holder._buffers.get(name, holder._parameters.get(name))
        buffer = plain(held).detach()
        if buffer.is_meta or bool(buffer.isnan().any()):
            yield found.name, "it holds no values, and its constructor does not give them again"
        elif (low := low_dtype_of(buffer.cpu())) is not None:
            yield found.name, f"{dtype_name(low)}-rounded values, which its constructor does not give again"


def _of_one_number(module: nn.Module, reference: Reference) -> Iterator[tuple[str, str]]:
    """Yield the buffers that may be tables and hold what fresh memory does: one number everywhere, or chaos.

    Those that are not called like tables count if their module makes little but positions, and if what they
    hold is zero, or of no size that a formula gives.
    """
    if is_kept(module):
        return
    built = reference.module
    stock = stock_class(module)
    fills = changes.stores_when_called(stock)
    for name, buffer in own_tensors(module):
        if name not in module._buffers or buffer.is_meta:
            continue
        made = None if built is None else get_table(built, name)
        if made is not None and not (is_frequency(name) and _are_other_numbers(buffer, made)):
            continue  # the constructor tells what it should hold
        if _is_unnamed(module, name, buffer) and not fills:
            yield name, "it holds what memory does that nobody has filled"
            continue
        turned = is_frequency(name) and bytecode.facts(stock).turns
        if not (turned or has_position_name(name)) or (fills and not is_frequency(name)):
            continue
        values = in_real_numbers(plain(buffer).detach()).reshape(-1)
        if "mask" in name.lower() or values.numel() < 2 or not bool((values == values[0]).all()):
            continue
        is_first_row = values.numel() == buffer.shape[-1] and not is_frequency(name) and "slope" not in name
        if not is_first_row:
            yield name, f"each of its numbers is {values[0].item():g}, as in memory that nobody has filled"


def _are_other_numbers(held: torch.Tensor, made: Any) -> bool:
    """Whether a constructor makes one number everywhere, and ``held`` is no rounding of that."""
    if not isinstance(made, torch.Tensor) or made.is_meta or made.shape != held.shape:
        return False
    made = made.detach().reshape(-1)
    here = plain(held).detach().cpu().reshape(-1)
    return bool((made == made[0]).all()) and not is_cast(here, made)


def _is_unnamed(module: nn.Module, name: str, buffer: torch.Tensor) -> bool:
    """Whether a buffer whose name says nothing is to hold positions and holds numbers of no formula."""
    if has_position_name(name) or is_frequency(name) or is_seldom_position(name) or is_state(module, name):
        return False
    if "mask" in name.lower() or not may_be_filled_with_positions(module, name, buffer):
        return False
    values = in_real_numbers(plain(buffer).detach()).reshape(-1).float().abs()
    if values.numel() < _FEWEST or bool(values.isinf().any()):
        return False
    is_odd = (values.isnan() | (values > 1 / _NOTHING)).any() | (values <= _NOTHING).all()
    return bool(is_odd)
