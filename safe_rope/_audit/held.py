"""The position tables of a module, each as it is and as it should be."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.tables import Held, frozen, rounded_lists
from safe_rope._base import changes
from safe_rope._base.dtypes import dtype_name, low_dtype_of
from safe_rope._base.forwards import reads_of
from safe_rope._base.tensors import is_shared
from safe_rope._base.torch_private import is_learned
from safe_rope._base.turned import turned_when_multiplied
from safe_rope._protection.frozen import turns_in_script, unkept_tables
from safe_rope._protection.rewrite import is_kept, is_pinned, state_of
from safe_rope._recognition.ask import copied
from safe_rope._recognition.explained import UNKNOWN, is_cast
from safe_rope._recognition.holdings import entries, get_table, nested
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.reference import Reference, stock_class
from safe_rope._recognition.tables import (
    is_empty_table,
    is_finished,
    is_frequency,
    is_library_module,
    is_no_position,
    is_readable,
    is_table_of,
)
from safe_rope._recognition.truths import is_told_alone, tables_of
from safe_rope.registry import RopePatch
from safe_rope.rotation import plain

KEPT = " (kept)"
"""Follows the name of a table whose values the guard keeps, beside what stands in the module."""


def held_tables(module: nn.Module, reference: Reference, patch: RopePatch | None) -> dict[str, Held]:
    """Return every position table of a module by its name.

    Args:
        module: what holds them.
        reference: what its constructor makes.
        patch: what covers it, or None.
    """
    every = (
        *_cast_beside(module, reference),
        *_kept_or_built(module, reference, patch),
        *_out_of_reach(module, reference),
        *_nested(module, reference),
    )
    return {held.name: held for held in every}


def may_be_cast_beside(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module takes sines of products with, and others that may have been complex.

    No name, and no order of their numbers, tells that they are tables.
    """
    stock: Any = stock_class(module)
    turned, changed = turned_when_multiplied(stock), changes.changed_by_forward(stock)
    for name, value in () if is_library_module(module) else entries(module):
        if not isinstance(value, Tensor) or value.is_meta or not is_readable(value):
            continue
        is_float = value.is_floating_point() and not isinstance(value, nn.Parameter)
        is_wanted = is_float and (name in turned or value.numel() > 1)
        if is_wanted and not (name in changed or is_no_position(name)):
            yield name, value


def _cast_beside(module: nn.Module, reference: Reference) -> Iterator[Held]:
    """Yield those whose numbers are what a cast leaves of those that the constructor makes."""
    built = reference.module
    if built is None or built is module:
        return
    turned = turned_when_multiplied(stock_class(module))
    for name, value in may_be_cast_beside(module):
        made, current = get_table(built, name), plain(value).detach().cpu()
        if not isinstance(made, Tensor) or made.is_meta or made.shape != current.shape:
            continue
        is_told = made.is_complex() or (name in turned and made.is_floating_point())
        if is_told and is_cast(current, made) and not bool((current == made).all()):
            yield Held(name, value, made, False, certain=True)


def fill_as_loaded(module: nn.Module, built: nn.Module, tables: Container[str]) -> Iterator[tuple[str, str]]:
    """Give what a constructor makes the values of what files fill and ``forward`` reads beside ``tables``.

    A rotary module of Mistral Large 4 learns what its frequencies are multiplied by; the constructor only
    makes room for it. Yield the name of each that is rounded, and what its numbers say.
    """
    for name in sorted(reads_of(stock_class(module)).attributes & built._buffers.keys()):
        mine, made = module._buffers.get(name), built._buffers[name]
        if name in tables or name in module._non_persistent_buffers_set or mine is None or made is None:
            continue
        values = plain(mine).detach()
        if values.is_meta or values.shape != made.shape or not values.is_floating_point():
            continue
        values = values.to("cpu", copy=True)
        if not is_cast(values, made) and bool(values.isfinite().all()):
            built._buffers[name] = values
            if (low := low_dtype_of(values)) is not None:
                yield name, f"{dtype_name(low)}-rounded values, which its constructor does not give again"


def _kept_or_built(module: nn.Module, reference: Reference, patch: RopePatch | None) -> Iterator[Held]:
    """Every table that the guard keeps, or would keep, with what it should hold."""
    again = reference.again
    certain = again is not None and again.certain
    built = _built(module, reference, patch)
    if is_kept(module):
        state, cpu = state_of(module), torch.device("cpu")
        names = tuple(state.names(module))
        empty = () if reference.rebuilt is None else reference.rebuilt.empty(reference.path)
        for name in names:
            kept = state.make(module, name, cpu)
            finished = not is_frequency(name)
            if is_pinned(module) and certain and built.get(name, (None, True))[0] is not None:
                yield Held(f"{name}{KEPT}", kept, built[name][0], finished)
            current = get_table(module, name)
            untold = state.notes.get(name) in UNKNOWN or is_learned(current)
            # Memory that the constructor leaves is kept until a use adopts what somebody fills it with.
            untold |= name in empty and not state.is_in_place(name, current)
            yield Held(name, current, None if untold else kept, finished)
        # What is named, and not kept, is as in the stock model.
        built = {name: built[name] for name in state.notes if name in built and name not in names}
    for name, (expected, finished) in built.items():
        current = module._parameters.get(name) if name in module._parameters else get_table(module, name)
        if current is not None:
            if expected is not None and is_shared(current, expected):
                expected = None  # the constructor has handed out a table that lives
            yield Held(name, current, expected, finished, certain)
    yield from frozen(module, reference)
    yield from rounded_lists(module, reference)


def _out_of_reach(module: nn.Module, reference: Reference) -> Iterator[Held]:
    """Tables that the guard names and does not keep: parametrized, or in one of torch's own modules."""
    again = reference.again
    for found in unkept_tables(module):
        read, name = operator.attrgetter(found.name), found.name.rpartition(".")[2]
        current, expected = read(module), None
        with contextlib.suppress(AttributeError):
            expected = read(reference.module)
        expected = expected if isinstance(expected, Tensor) and not expected.is_meta else None
        value = current if expected is None else expected
        origin = Origin.NONE if expected is None else reference.origin(found.name)
        # What else stands in such a module may be a statistic, which is another one by now.
        told = is_table_of(module, name, value, origin) or is_empty_table(module, name, value)
        if told or turns_in_script(module.get_submodule(found.name.rpartition(".")[0])):
            certain = again is not None and again.certain
            finished = is_finished(stock_class(module), name, origin, value)
            yield Held(found.name, current, expected, finished, certain)


def _nested(module: nn.Module, reference: Reference) -> Iterator[Held]:
    """Tables in containers inside of containers, or in closures, where nothing keeps them."""
    rebuilt, now = reference.rebuilt, dict(nested(module))
    if rebuilt is None:
        for name, tensor in now.items():
            if is_told_alone(module, name, tensor):
                yield Held(name, tensor, None, not is_frequency(name))
        return
    notes = state_of(module).notes if is_kept(module) else {}
    for name, tensor in now.items():
        if notes.get(name.partition(".")[0]) in UNKNOWN:
            yield Held(name, tensor, None, not is_frequency(name))
    made = [dict(nested(module)) for module in reference.replayed_modules()] if now else []
    for name, (expected, finished) in rebuilt.nested(reference.path).items():
        if (current := now.get(name)) is not None:
            replays = tuple(tables[name] for tables in made if name in tables)
            handed = is_shared(current, expected)  # the constructor was given what lives
            true = None if handed else expected
            yield Held(name, current, true, finished, not handed, replays=replays)


def _built(
    module: nn.Module, reference: Reference, patch: RopePatch | None
) -> dict[str, tuple[Tensor | None, bool]]:
    # A constructor that hands out an instance that lives tells nothing of what that should hold.
    alive = reference.module is module
    tables = tables_of(module, Reference(None) if alive else reference, patch)
    built = None if alive else reference.module
    if built is None:
        return tables
    for name, current in list(vars(module).items()):
        kept = getattr(stock_class(module), name, None)
        expected, finished = tables.get(name, (None, not is_frequency(name)))
        if expected is None and isinstance(current, Tensor) and isinstance(kept, functools.cached_property):
            with contextlib.suppress(Exception):  # a foreign property
                made = kept.func(copied(built))
                is_made = isinstance(made, Tensor)
                if name in tables or (is_made and is_table_of(module, name, made, Origin.NONE)):
                    tables[name] = (made if is_made else None), finished
    return tables
