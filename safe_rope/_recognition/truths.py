"""What the position tables of a module should hold, and whether the module is what its constructor makes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safe_rope._base.random_states import random_states_kept
from safe_rope._base.tensors import is_shared
from safe_rope._recognition.ask import made_in_first_forward, made_when_called
from safe_rope._recognition.explained import DRAWN, LOST, Truth, find_truth, is_cast
from safe_rope._recognition.holdings import entries, get_table, has_no_shape
from safe_rope._recognition.integers import INTEGERS, MOST
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.reference import Reference
from safe_rope._recognition.tables import (
    counts,
    has_position_name,
    is_counted_with,
    is_empty_table,
    is_frequency,
    is_handed_on,
    is_multiplied_and_turned,
    is_no_position,
    is_state,
    is_table_of,
    is_turned_when_multiplied,
    made_later,
    only_turns,
    own_tensors,
)
from safe_rope._recognition.waves import (
    PHASE,
    are_phases,
    are_phasors,
    are_sines_of,
    has_values,
    is_one_number,
    oscillates,
)
from safe_rope.registry import RopePatch

HOLDERS = (nn.Embedding, nn.ParameterList, nn.ParameterDict)
"""Modules of torch's whose parameters are their parent's tables."""
ROUNDED = 4 * 2.0**-8
"""What sines may be off by that were rounded to 16 bits."""


def tables_of(
    module: nn.Module, reference: Reference, patch: RopePatch | None
) -> dict[str, tuple[torch.Tensor | None, bool]]:
    """Return for each position table what its constructor gives, and whether it is ready for use.

    The values are None where the constructor does not make the table, or cannot be run again.
    """
    named = _tables_by_name(module, reference.above)
    if reference.again is None or reference.rebuilt is None or reference.module is None:
        return {name: (None, is_finished) for name, is_finished in named.items()}
    if patch is not None and patch.adjust is not None:
        patch.adjust(reference.module)
    tables: dict[str, tuple[torch.Tensor | None, bool]] = {
        **reference.again.tables(reference.path, reference.above)
    }
    empty = reference.rebuilt.empty(reference.path)
    for name, is_finished in named.items():
        made, current = _made(reference, name), get_table(module, name)
        if name in empty and (reference.early or current.numel() == 1) and not current._version:
            continue
        if name not in empty and _is_left_unknown(module, name, made, current):
            continue
        is_filled = made is not None and not is_state(module, name) and _is_filled_since(made, current)
        by_another = made is None or made.is_meta or made.shape != current.shape or name in empty
        by_another = by_another or bool(made.isnan().any()) or is_filled
        if by_another and (name not in tables or is_filled):
            tables[name] = None, is_finished  # filled by somebody else than the constructor
    if reference.early and all(_may_be_filled_yet(module, name, made) for name, (made, _) in tables.items()):
        tables.clear()
    for name, tensor in own_tensors(module):
        made = _made(reference, name)
        is_given = tensor.is_meta and isinstance(made, torch.Tensor) and made.is_meta
        if is_given and name not in tables and name in module._non_persistent_buffers_set:
            tables[name] = None, True  # no file fills what the constructor got on meta
    if tables:
        tables.update(_lost_beside(module, reference, tables.keys()))
    for name, values in made_in_first_forward(reference.module, made_later(reference.module)).items():
        if get_table(module, name) is None:
            tables[name] = values, False
    for name, values in _made_since(module, reference.module, tables):
        tables[name] = values, tables[name][1]
    if patch is not None and patch.adjust is not None:
        return tables  # which may have made a buffer of a parameter
    return {name: table for name, table in tables.items() if not _is_trained_since(module, reference, name)}


def _made_since(
    module: nn.Module, built: nn.Module, tables: dict[str, tuple[torch.Tensor | None, bool]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what tables should hold that a forward has made in the module, and its constructor has not.

    It is what stands there, if that is sines of the module's frequencies; or what a forward makes again.
    """
    held = {name: get_table(module, name) for name, (made, _) in tables.items() if made is None}
    ready = {
        name: table
        for name, table in held.items()
        if isinstance(table, torch.Tensor) and not table.is_meta and get_table(built, name) is None
    }
    for name, table in list(ready.items()):
        if any(turns_by(module, table, one) for one in frequencies(tables)):
            yield name, ready.pop(name).detach().to("cpu", copy=True)  # what it shares proves nothing
    for name, values in made_when_called(built, ready).items():
        if _is_as_made(ready[name].detach().cpu(), values):
            yield name, values


def frequencies(tables: Mapping[str, tuple[torch.Tensor | None, bool]]) -> list[torch.Tensor]:
    """Return the frequencies among the tables that a constructor makes."""
    made = [values for values, is_finished in tables.values() if values is not None and not is_finished]
    return [values for values in made if values.is_floating_point() and not values.is_meta]


def turns_by(module: nn.Module, table: torch.Tensor, frequencies: torch.Tensor) -> bool:
    """Whether a table is of sines of frequencies, multiplied by one of the module's numbers or by none."""
    scales = {1.0, *(value for value in vars(module).values() if type(value) is float and value > 0)}
    return any(are_sines_of(table, frequencies, scale) for scale in scales)


def _is_as_made(current: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a table is what a forward makes, cast or on a device that rounds phases otherwise."""
    if is_cast(current, made):
        return True
    if current.dtype != made.dtype or not made.is_floating_point():
        return False
    return bool(((current - made).abs() <= PHASE * max(made.shape)).all())


def _is_filled_since(made: torch.Tensor, current: torch.Tensor) -> bool:
    """Whether a constructor has made one number throughout, and others stand there, or none."""
    if current.is_meta or made.is_meta or made.numel() == 1 or has_values(made):
        return False
    return has_values(current) or bool(current.isnan().any())


def _is_left_unknown(module: nn.Module, name: str, made: torch.Tensor | None, current: torch.Tensor) -> bool:
    """Whether a constructor has filled with NaN, for not known yet, what only a count makes a table of."""
    if made is None or made.is_meta or current.is_meta or has_position_name(name) or only_turns(module):
        return False
    return counts(module) and bool(made.isnan().all() & current.isnan().any())


def _may_be_filled_yet(module: nn.Module, name: str, made: torch.Tensor | None) -> bool:
    """Whether a table is one number throughout, which a parent may overwrite where that is seen."""
    current = get_table(module, name)
    is_there = isinstance(current, torch.Tensor) and not current.is_meta
    return is_there and made is not None and is_one_number(made)


def _is_trained_since(module: nn.Module, reference: Reference, name: str) -> bool:
    """Whether somebody has put a parameter that is trained in the place of what a constructor makes."""
    parameter, made = module._parameters.get(name), reference.module
    is_trained = parameter is not None and parameter.requires_grad
    return is_trained and made is not None and name not in made._parameters


def _lost_beside(
    module: nn.Module, reference: Reference, known: Container[str]
) -> Iterator[tuple[str, tuple[torch.Tensor | None, bool]]]:
    """Yield what a module has lost beside its tables: integers, as an index into one of those, and numbers.

    Integers that are counted, and a number, as an amplitude, have values. So do numbers and truths that are
    in no file and not drawn, as a mask. What is drawn, and is in no file, has none. A number that the methods
    change has those of a file, where it is in one. Where a module takes sines of products with a number, or
    has no weights and takes sines, these are made of it, also before it is lost.
    """
    if reference.rebuilt is None or reference.module is None:
        return
    for name, value in entries(module):
        made = _made(reference, name)
        origin = reference.origin(name)
        if not isinstance(value, torch.Tensor) or name in known:
            continue
        if value.is_floating_point() and value.numel() == 1:
            changes = is_state(module, name)
            in_no_file = name in module._non_persistent_buffers_set
            is_meant = value.is_meta and (in_no_file or not changes)
            is_turned = only_turns(module) or is_turned_when_multiplied(module, name)
            is_turned &= origin is not Origin.NONE  # `torch.FloatTensor` fills nothing
            is_meant |= not (changes or value.is_meta) and (bool(value.isnan()) or is_turned)
            if is_meant and not origin & (Origin.RANDOM | Origin.EMPTY) and _is_real(made):
                yield name, (made, True)
            continue
        if not value.is_meta or value.is_complex():
            continue
        in_no_file = name in module._non_persistent_buffers_set and not is_state(module, name)
        if in_no_file and _is_few(made) and not origin & (Origin.RANDOM | Origin.EMPTY):
            yield name, (made.to(value.dtype), True)
            continue
        if value.dtype not in INTEGERS:
            continue
        is_counted = has_position_name(name) and origin & Origin.COUNTED
        if is_drawn(module, name, origin):
            yield name, (None, True)
        elif is_counted and isinstance(made, torch.Tensor) and made.dtype in INTEGERS and not made.is_meta:
            yield name, (made, True)


def _is_real(made: Any) -> bool:
    """Whether a constructor has made a number."""
    there = isinstance(made, torch.Tensor) and made.is_floating_point() and not made.is_meta
    return there and made.numel() == 1 and bool(made.isfinite())


def _is_few(made: Any) -> bool:
    """Whether a constructor has made so many numbers that they may be kept, as a mask."""
    return isinstance(made, torch.Tensor) and not made.is_meta and made.numel() <= MOST


def is_drawn(module: nn.Module, name: str, origin: Origin) -> bool:
    """Whether no constructor and no file gives a buffer again."""
    return bool(origin & Origin.RANDOM) and name in module._non_persistent_buffers_set


def frozen_tables(
    module: nn.Module, reference: Reference
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the frozen parameters that a module's constructor makes as position tables, with their values.

    Those of `HOLDERS` in it, too: each by its path, with the parameter and what it should hold.
    """
    built = reference.module
    if built is None or reference.rebuilt is None:
        return
    for name, parameter, true in _frozen_pairs(module, built):
        if is_table_of(module, name, true, reference.origin(name)):
            yield name, parameter, true.detach()
    for child_name, child in module._modules.items():
        twin = built._modules.get(child_name)
        if twin is None or not isinstance(child, HOLDERS):
            continue
        for name, parameter, true in _frozen_pairs(child, twin):
            whole, values = f"{child_name}.{name}", true.detach()
            # An embedding is filled at random before sinusoids are copied into it.
            origin = Origin.NONE if oscillates(values) else reference.origin(whole)
            if is_table_of(module, whole, true, origin) or is_frequency(whole):
                yield whole, parameter, values


def parametrized(module: nn.Module, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of what torch computes for a module from frozen parameters, and no others.

    What computes it is a copy in evaluation: a spectral norm changes its vectors whenever it is read.
    """
    parts = module._modules.get("parametrizations")
    for name, part in () if parts is None else parts.named_children():
        own = [*part.parameters()]
        if not own or any(one.requires_grad for one in own) or not is_wanted(name):
            continue
        value = None
        with contextlib.suppress(Exception), random_states_kept(), torch.no_grad():  # foreign code
            value = copy.deepcopy(part, {id(one): one for one in own}).eval()()
        if isinstance(value, torch.Tensor):
            yield name, value


def _frozen_pairs(module: nn.Module, built: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    computed = parametrized(module, built._parameters.__contains__)
    for name, parameter in (*module._parameters.items(), *computed):
        true = built._parameters.get(name)
        if not (parameter is None or parameter.requires_grad or true is None or true.is_meta):
            yield name, parameter, true


def truths_of(
    module: nn.Module, reference: Reference, patch: RopePatch | None
) -> tuple[dict[str, Truth], dict[str, bool]]:
    """Return for each position table what it should hold, and whether it is ready for use."""
    truths, finished = {}, {}
    tables = tables_of(module, reference, patch)
    later = made_later(reference.module) if reference.module is not None else []
    for name, (values, is_finished) in tables.items():
        current = get_table(module, name)
        # A patch may make a buffer of a parameter, and zero.Init leaves no shape of that.
        if values is not None and (name in module._parameters or (current is None and name in later)):
            truths[name] = Truth(values, "constructor")
        elif isinstance(current, torch.Tensor):
            truths[name] = _truth(module, name, values, reference)
        elif values is not None:
            now = type(current).__name__
            reason = f"it is {now}, and its constructor makes {tuple(values.shape)}; left as it is"
            truths[name] = Truth(None, "unknown", reason)
        finished[name] = is_finished
    return truths, finished


def _truth(module: nn.Module, name: str, rebuilt: torch.Tensor | None, reference: Reference) -> Truth:
    current, runs = get_table(module, name), reference.rebuilt is not None
    if rebuilt is not None and is_shared(current, rebuilt):
        rebuilt, runs = None, False  # the constructor has handed out what lives already: that proves nothing
    device = current.device if isinstance(current, torch.Tensor) else None
    if isinstance(current, torch.Tensor) and not current.is_meta:
        current = current.detach().cpu()
    elif rebuilt is not None and _was_written_to(current, reference, name):
        return Truth(None, "unfilled", LOST)
    elif rebuilt is None and current is not None and is_drawn(module, name, reference.origin(name)):
        return Truth(None, "unfilled", DRAWN)
    truth = find_truth(
        current,
        rebuilt,
        plain=reference.plain,
        certain=reference.again is not None and reference.again.certain,
        runs=runs,
        replays=lambda: reference.replays(name, device),
    )
    is_memory = current is not None and reference.plain and bool(reference.origin(name) & Origin.EMPTY)
    if truth.verdict == "unfilled" and is_memory and not current.is_meta:
        truth = Truth(current, "built")  # which may hold anything yet, NaN as well
    if truth.values is current and current is not None:
        return truth._replace(values=current.clone())  # nobody else's memory
    return truth


def _made(reference: Reference, name: str) -> Any:
    """Return what the constructor makes of a table; None where it gets its shape in the first forward."""
    made = None if reference.module is None else get_table(reference.module, name)
    return None if isinstance(made, torch.Tensor) and has_no_shape(made) else made


def _was_written_to(current: torch.Tensor | None, reference: Reference, name: str) -> bool:
    """Whether a tensor on meta has another shape than its constructor's, or more has been written to it."""
    made = _made(reference, name)
    if not isinstance(made, torch.Tensor) or current is None:
        return False
    return current.shape != made.shape or current._version > made._version


def _tables_by_name(module: nn.Module, above: type | None) -> dict[str, bool]:
    """Names of the tables of a module that cannot be built again, and whether they are ready for use."""
    return {
        name: tensor.numel() > 1
        and not (
            is_frequency(name)
            or is_counted_with(module, name, tensor)
            or _may_be_phases(name, tensor)
            or is_multiplied_and_turned(module, name, tensor)
            or is_handed_on(module, name, tensor, above)
        )
        for name, tensor in own_tensors(module)
        if is_told_alone(module, name, tensor, above)
    }


def is_told_alone(module: nn.Module, name: str, tensor: torch.Tensor, above: type | None = None) -> bool:
    """Whether a tensor of a module that cannot be built again is a position table: by name or by values.

    ``above`` is the class of the module around it, where that is known.
    """
    if is_table_of(module, name, tensor, Origin.NONE) or is_empty_table(module, name, tensor):
        return True
    if is_multiplied_and_turned(module, name, tensor) or is_counted_with(module, name, tensor):
        return True
    if is_handed_on(module, name, tensor, above):
        return True
    is_wave = not tensor.is_meta and (oscillates(tensor, ROUNDED) or are_phasors(tensor, ROUNDED))
    return is_wave or _may_be_phases(name, tensor)


def _may_be_phases(name: str, tensor: torch.Tensor) -> bool:
    """Whether a table whose name says nothing may hold what sines are taken of, whoever takes them."""
    named = tensor.is_meta or is_no_position(name) or has_position_name(name)
    return not named and are_phases(tensor, ROUNDED)


def is_understood(module: nn.Module, reference: Reference, truths: dict[str, Truth]) -> bool:
    """Whether the module is what its constructor makes, but for frequencies that somebody has put there."""
    rebuilt = reference.module
    if rebuilt is None or any(truth.values is None for truth in truths.values()):
        return False
    others = {
        n for n, truth in truths.items() if truth.verdict != "constructor" and not _may_differ(n, truth)
    }
    own = _plain_attributes(module)
    # What a forward counts up, such as the length of a cache, says nothing of what was meant.
    meant = {name: value for name, value in _plain_attributes(rebuilt).items() if "cached" not in name}
    return not others and all(own.get(name, value) == value for name, value in meant.items())


def _may_differ(name: str, truth: Truth) -> bool:
    values = truth.values
    return (
        name.endswith("inv_freq")
        and values is not None
        and values.dim() == 1
        and values.dtype == torch.float32
    )


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (int, float, bool, str) and name != "training" and not name.startswith("_")
    }
