"""Decide how a module is protected, and do it: fully where it can be, pinned where it holds positions.

Shared by `safe_rope.guard`, which sees modules being built, and `safe_rope.protect`, which finds them built.
Every module takes the same path, whether a `RopePatch` covers it or not. Its constructor tells what its
tables should hold. If our own tables give the stock module's cos and sin to the bit, they take over. If not,
the module's computation stays, on tables that stay correct. Nothing is changed before `Protection.carry_out`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._protection.frozen import has_damaged_sines, round_once
from safe_rope._protection.pinned import shared
from safe_rope._protection.probe import full_state
from safe_rope._protection.rewrite import ProtectedModule, pin_module, protect_module, state_of
from safe_rope._protection.rotary import RotaryState
from safe_rope._recognition.applications import Applications, around, of_pinned
from safe_rope._recognition.conditions import forward_lowers
from safe_rope._recognition.explained import IMPORTED_LOW, UNKNOWN, UNMADE, UNTOLD
from safe_rope._recognition.holdings import get_table, nested
from safe_rope._recognition.integers import move_back
from safe_rope._recognition.numbers import rounded_numbers
from safe_rope._recognition.reference import Reference, stock_class
from safe_rope._recognition.specs import is_position_module
from safe_rope._recognition.tables import (
    LAZY,
    UNREAD,
    has_no_positions,
    is_array,
    makes_own_waves,
    may_hold_positions,
    only_counts,
    only_makes_positions,
    uninitialized,
    unreadable,
)
from safe_rope._recognition.truths import is_told_alone, is_understood, truths_of, turns_by
from safe_rope.frequencies import Bits
from safe_rope.registry import find

logger = logging.getLogger(__name__)

_CASTS = ("to", "type", "float", "double", "half", "bfloat16", "_apply")
_NESTED = "it holds tables in a container inside of another one, or in a closure, where nothing keeps them"
_ELSEWHERE = "they are kept on a class or by a function that remembers, and nobody can say what they hold"


class Options(NamedTuple):
    """What `safe_rope.guard` or `safe_rope.protect` was asked for."""

    tables: str
    apply: str
    inv_freq: Bits = "checkpoint"


class Protection(NamedTuple):
    """What is to be done for one module, and what of it the report has to name.

    ``state`` is for full protection; without one the tables of ``pins`` are kept, each with its true values
    and whether they are ready for use.
    """

    module: nn.Module
    state: RotaryState | None = None
    pins: dict[str, tuple[torch.Tensor, bool]] = {}
    applied: Applications | None = None
    adjust: Callable[[nn.Module], None] | None = None
    notes: dict[str, str] = {}
    reference: Reference | None = None

    @property
    def untold(self) -> str:
        """Why nobody can say whether it is right as it is; empty where that is known."""
        return _reasons({name: reason for name, reason in self.notes.items() if reason in UNKNOWN})

    def carry_out(self) -> None:
        """Protect the module."""
        if self.state is not None:
            protect_module(self.module, self.state)
        else:
            if self.adjust is not None:
                self.adjust(self.module)
            pin_module(self.module, self.pins, self.applied)
        kept = state_of(self.module)
        kept.notes.update(self.notes)
        kept.replays = self.reference.replays if self.reference is not None else None


class Unprotectable(NamedTuple):
    """A module that holds positions and cannot be protected, and why."""

    module: nn.Module
    reason: str


def concerns(module: nn.Module) -> bool:
    """Whether ``module`` may hold positions and nothing has been done for it yet."""
    cls = type(module)
    if cls.__module__.startswith("torch.") or isinstance(module, ProtectedModule):
        return False
    if find(cls) is not None:
        return True
    if not has_no_positions(module):  # each module of a model is asked, four times
        if may_hold_positions(module) or only_makes_positions(module, cls) or only_counts(module, cls):
            return True
        in_arrays = any(map(is_array, vars(module).values()))
        if (in_arrays or not module._buffers) and makes_own_waves(cls):
            return True
    if has_damaged_sines(module):
        return True
    frozen = (p for p in module._parameters.values() if p is not None and not p.requires_grad)
    return not module._modules and any(p.is_floating_point() for p in frozen)


def prepare(
    module: nn.Module, reference: Reference, namespaces: tuple[str, ...], options: Options
) -> Protection | Unprotectable | None:
    """Work out how to protect ``module``; None where it holds no positions.

    Args:
        module: what `concerns` says yes to.
        reference: what its constructor makes.
        namespaces: names of the Python modules whose functions may apply what the module returns, besides
            its own.
        options: what `safe_rope.guard` was asked for.

    """
    try:
        return _prepare(module, reference, namespaces, options)
    except Exception as error:
        # A model that nobody has described must still be built; the report says what went wrong.
        logger.info("%s cannot be protected", type(module).__name__, exc_info=True)
        return Unprotectable(module, f"{type(error).__name__}: {error}")


def _prepare(
    module: nn.Module, reference: Reference, namespaces: tuple[str, ...], options: Options
) -> Protection | Unprotectable | None:
    lazy = uninitialized(module)
    if lazy:
        return Unprotectable(module, _reasons(dict.fromkeys(lazy, LAZY)))
    patch = find(module)
    if reference.module is module:
        reference = Reference(None, plain=reference.plain)  # the class hands out an instance that lives
    round_once(module, reference)
    vars(module).update(rounded_numbers(module, reference))
    move_back(module, reference)
    truths, finished = truths_of(module, reference, patch)
    notes = {name: truth.reason for name, truth in truths.items() if truth.is_named}
    notes.update(dict.fromkeys(unreadable(module), UNREAD))
    if reference.rebuilt is not None:
        built = reference.rebuilt.nested(reference.path)
        turned = [truth.values for truth in truths.values() if truth.verdict == "constructor"]
        for name, tensor in nested(module):
            if name in built or not is_told_alone(module, name, tensor):
                continue
            if not any(one is not None and turns_by(module, tensor, one) for one in turned):
                notes[name.partition(".")[0]] = UNMADE
    if reference.rebuilt is not None and (not reference.plain or _casts_otherwise(stock_class(module))):
        notes.update({name.partition(".")[0]: _NESTED for name in built})
        if reference.rebuilt.elsewhere:
            notes["tables outside of it"] = _ELSEWHERE
    true = {
        name: truth.values
        for name, truth in truths.items()
        if truth.values is not None and not (truth.is_named and truth.values.dtype in LOW)
    }
    found = around(stock_class(module), namespaces, patch)
    if reference.module is not None and is_understood(module, reference, truths):
        state = full_state(module, reference.module, patch, true, found, namespaces, **options._asdict())
        if state is not None and not _follows_an_unknown_rule(state, reference.module, true):
            return Protection(module, state, notes=notes, reference=reference)
    pins = {name: (shared(values), finished[name]) for name, values in true.items()}
    makes = only_makes_positions(module, type(module)) or only_counts(module, type(module))
    if not pins and not makes:
        rotates = patch is not None and bool(patch.methods)
        if notes:
            return Unprotectable(module, _reasons(notes))
        if reference.rebuilt is None and (rotates or is_position_module(module)):
            return Unprotectable(module, UNTOLD)
        if not rotates:
            return None
    if forward_lowers(stock_class(module)):
        notes["forward"] = IMPORTED_LOW
    applied = None if options.apply == "stock" else of_pinned(module, reference.module, found, patch)
    adjust = patch.adjust if patch is not None else None
    return Protection(module, None, pins, applied, adjust, notes, reference)


def _casts_otherwise(cls: type[nn.Module]) -> bool:
    """Whether a class overrides a cast, which may then reach what that of torch does not."""
    for name in _CASTS:
        torchs: Any = getattr(nn.Module, name)
        # A class that a skip_init has given torch's may have it without a guard's wrapper around it.
        if not any(getattr(cls, name) is one for one in (torchs, inspect.unwrap(torchs))):
            return True
    return False


def _follows_an_unknown_rule(state: RotaryState, reference: nn.Module, true: dict[str, torch.Tensor]) -> bool:
    """Whether somebody has put other frequencies there, which follow the length by a rule nobody has told."""
    own = any(
        not any(torch.equal(f.inv_freq, s.inv_freq(bits=state.bits)) for s in (f.spec, f.spec.unscaled()))
        for f in state.sets.values()
    )
    differs = any(
        (rebuilt := get_table(reference, name)) is None or not torch.equal(values, rebuilt)
        for name, values in true.items()
        if name.endswith("inv_freq")
    )
    depends = any(f.spec.depends_on_length for f in state.sets.values())
    return own and differs and (depends or state.convention == "length")


def _reasons(notes: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in notes.items())
