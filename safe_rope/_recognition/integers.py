"""Integers that a constructor makes for whoever looks them up, as an index into a table of weights.

No cast reaches them, but a constructor that counts in 16 bits gives others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._base import bytecode
from safe_rope._base.tensors import is_given_back
from safe_rope._recognition.holdings import entries, get_table, has_no_shape, set_table
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.reference import Reference, stock_class
from safe_rope._recognition.tables import is_library_module, is_readable, is_state

INTEGERS = (torch.int32, torch.int64)
MOST = 2**22
"""Numbers beside tables that are looked at, or kept."""


def integers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a module holds of integers that no method changes."""
    if is_library_module(module):
        return
    for name, value in entries(module):
        if type(value) is not Tensor or value.is_meta or is_given_back(value) or not is_readable(value):
            continue
        if value.dtype in INTEGERS and 2 < value.numel() <= MOST and not is_state(module, name):
            yield name, value


def may_be_moved(module: nn.Module) -> bool:
    """Whether a module that counts holds integers that may be others than its constructor means."""
    stock: Any = stock_class(module)
    held = [value for _, value in integers(module)]
    if not held or not bytecode.may_count(stock) or not bytecode.may_make_whole(stock):
        return False
    return not all(map(is_from_zero, held))


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


def move_back(module: nn.Module, reference: Reference) -> None:
    """Give a module the integers that its constructor means in place of those that it has made in 16 bits.

    Whoever else holds the same tensor gets them, too. Those that a constructor sizes something by stay.
    """
    if reference.plain or reference.module is module:
        return
    for name, value in list(integers(module)):
        made = made_for(name, value, reference)
        if made is None or _is_same(value, made) or not is_moved(name, value, reference):
            continue
        if _may_be_indexed(value, made, reference) and _is_as_large(name, value, reference):
            try:
                value.copy_(made)
            except RuntimeError:  # several of its places are one in memory, or it was made for inference
                set_table(module, name, made.to(value.device, value.dtype, copy=True))


def _is_same(value: Tensor, made: Tensor) -> bool:
    return made.shape == value.shape and torch.equal(value.cpu(), made.to(value.dtype))


def _may_be_indexed(value: Tensor, made: Tensor, reference: Reference) -> bool:
    """Whether what is looked up with a constructor's integers is known to have a place for each of them."""
    if reference.early or reference.again is None or reference.again.rebuilt is None:
        return True  # whoever looks up with them is yet to be made
    is_within = bool((made.min() >= value.min()) & (made.max() <= value.max()))
    return is_within or next(reference.again.rebuilt.module.parameters(), None) is not None


def _is_as_large(name: str, value: Tensor, reference: Reference) -> bool:
    """Whether a constructor that counts in 16 bits, to these integers, makes all as large as it means it."""
    if reference.again is None or reference.again.rebuilt is None:
        return False
    meant = list(_sizes(reference.again.rebuilt.module))
    for replay in reference.again.replays():
        with contextlib.suppress(AttributeError):
            one = get_table(replay.module.get_submodule(reference.path), name)
            if isinstance(one, Tensor) and _is_same(value, one) and list(_sizes(replay.module)) == meant:
                return True
    return False


def _sizes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the shapes of the tensors and the whole numbers of a module and of those in it."""
    for path, part in module.named_modules():
        for name, value in (*entries(part), *part._parameters.items(), *vars(part).items()):
            if type(value) is int:
                yield f"{path}.{name}", value
            elif isinstance(value, Tensor) and not has_no_shape(value):
                yield f"{path}.{name}", value.shape
