"""Integers that a constructor makes for whoever looks them up, as an index into a table of weights.

No cast reaches them, but a constructor that counts in 16 bits gives others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._base import bytecode
from safe_rope._base.tensors import is_given_back
from safe_rope._recognition.holdings import entries, get_table
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.reference import Reference, stock_class
from safe_rope._recognition.tables import is_library_module, is_readable, is_state

_INTEGERS = (torch.int32, torch.int64)
_MOST = 2**22


def integers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a module holds of integers that no method changes."""
    if is_library_module(module):
        return
    for name, value in entries(module):
        if type(value) is not Tensor or value.is_meta or is_given_back(value) or not is_readable(value):
            continue
        if value.dtype in _INTEGERS and 2 < value.numel() <= _MOST and not is_state(module, name):
            yield name, value


def may_be_moved(module: nn.Module) -> bool:
    """Whether a module that counts holds integers that may be others than its constructor means."""
    stock: Any = stock_class(module)
    held = [value for _, value in integers(module)]
    return bool(held) and bytecode.may_count(stock) and not all(map(is_from_zero, held))


def is_from_zero(value: Tensor) -> bool:
    """Whether each row of integers counts from zero on, as ``position_ids`` do."""
    return bool((value == torch.arange(value.shape[-1], device=value.device)).all())


def is_counted(origin: Origin) -> bool:
    """Whether integers of that origin are counted, and not drawn."""
    return bool(origin & Origin.COUNTED) and not origin & Origin.RANDOM


def made_for(name: str, value: Tensor, reference: Reference) -> Tensor | None:
    """Return what a constructor makes where a module holds integers, if it is of that shape."""
    made: Any = None if reference.module is None else get_table(reference.module, name)
    is_told = isinstance(made, Tensor) and not made.is_meta and made.shape == value.shape
    return made if is_told else None


def is_moved(name: str, value: Tensor, reference: Reference) -> bool:
    """Whether integers are what a constructor makes in 16 bits."""
    if not is_counted(reference.origin(name)):
        return False
    return any(one is not None and _is_same(value, one) for one in reference.replays(name))


def moved_back(module: nn.Module, reference: Reference) -> Iterator[tuple[str, Tensor]]:
    """Yield the integers that a constructor has made in 16 bits, as it means them."""
    if reference.plain or reference.module is module:
        return
    for name, value in integers(module):
        made = made_for(name, value, reference)
        if made is not None and not _is_same(value, made) and is_moved(name, value, reference):
            yield name, made.to(value.device, value.dtype, copy=True)


def _is_same(value: Tensor, made: Tensor) -> bool:
    return made.shape == value.shape and torch.equal(value.cpu(), made.to(value.dtype))
