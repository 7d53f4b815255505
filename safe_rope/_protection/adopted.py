"""What parents have put into a module that was protected before, in 16 bits or under zero.Init.

A parent's constructor may call a method of its child, which sets a table when the child's own constructor
has ended: no rerun of that one tells what was meant. Those of the parents do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._protection.rewrite import keep_up, state_of
from safe_rope._recognition.explained import CHANGED, UNKNOWN, is_cast, is_damage, is_same
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import Reference

_CPU = torch.device("cpu")
_LARGEST = 1 << 26
"""Parameters of a parent that is built again for what it puts into its children."""


def is_small(owner: nn.Module) -> bool:
    """Whether a parent may be built again: at ZeRO 3 its parameters are empty here."""
    return sum(getattr(one, "ds_numel", one.numel()) for one in owner.parameters()) <= _LARGEST


def judge_adopted(
    module: nn.Module, own: Callable[[], Reference | None], above: Iterator[Reference | None]
) -> None:
    """Mend what parents have put into a module, where that is certain; name what nobody can tell.

    Args:
        module: a protected module that was built under conditions that lower what is computed.
        own: tells what its own constructor makes; None where it cannot be run again.
        above: what the constructor of each parent makes of it, the nearest first; ends with None where one
            cannot be run again. No constructor is run where nothing was set.

    """
    state = state_of(module)
    untold = {name for name, reason in state.notes.items() if reason in UNKNOWN}
    names = sorted((state.adopted | untold) & {*state.names(module)})
    before = own() if names else None
    for name in names:
        current = state.make(module, name, _CPU)
        above, references = itertools.tee(above)  # those are run that are asked for
        values, reason = _meant(current, name, before, references)
        if values is None:
            if reason:
                state.notes.setdefault(name, reason)
            continue
        if values is not current:
            state.adopt(module, name, values)
            state.replace_placed(name)
        if name in untold:
            del state.notes[name]
    state.adopted = frozenset()
    state.restore(module)
    keep_up(module)


def _meant(
    current: torch.Tensor, name: str, own: Reference | None, above: Iterable[Reference | None]
) -> tuple[torch.Tensor | None, str]:
    """Return what a table is to hold, None where that is not known; and what is to be said of it then."""
    before = None if own is None or own.module is None else get_table(own.module, name)
    is_changed = before is None
    for reference in above:
        true = None if reference is None or reference.module is None else get_table(reference.module, name)
        if reference is None or not isinstance(true, torch.Tensor) or true.is_meta:
            return None, CHANGED
        if is_same(current, true):
            return current, ""
        is_explained = is_damage(current, true, is_written=True)
        if is_explained or any(o is not None and is_cast(current, o) for o in _replays(reference, name)):
            return true, ""
        is_changed |= before is None or not is_same(true, before)
    return None, CHANGED if is_changed or current.dtype in LOW else ""


def _replays(reference: Reference, name: str) -> Iterator[torch.Tensor | None]:
    """Yield what a table may have become: a method of a pinned module computes as the stock one does."""
    yield from reference.replays(name)
    if reference.again is not None:
        yield from reference._replace(again=reference.again.as_stock).replays(name)
