"""Tables outside of modules that a model's code reads: on classes, in globals, in what functions remember.

No constructor of a module tells what those should hold, and several models may share one. Their numbers alone
say that they are rounded, or are sines of what was rounded.
"""

from __future__ import annotations

import gc
import logging
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from safe_rope._audit.report import AuditReport, Finding, ModuleAudit, worst
from safe_rope._audit.tables import damaged_in_itself
from safe_rope._base import bytecode
from safe_rope._base.containers import held_in, length_of
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.tensors import in_real_numbers, is_given_back
from safe_rope._base.text import class_name
from safe_rope._recognition.holdings import entries
from safe_rope._recognition.outside import CONTAINERS, OutOfReachError, outside, remembering_in
from safe_rope._recognition.reference import own_class
from safe_rope._recognition.tables import is_no_position, is_readable
from safe_rope._recognition.truths import ROUNDED
from safe_rope._recognition.waves import oscillates, rises_or_falls

logger = logging.getLogger(__name__)

_FEWEST, _ENOUGH = 8, 4096
"""Rows of a table that are looked at, and columns at most."""
_MOST = 2048
"""Values of a container that is looked into."""
_COUNTED = 256
"""Positions that every 16-bit dtype counts."""
_FEW = 4
"""Frequencies that no chance makes those of a 16-bit dtype."""
_OFF = 2.0**-21
"""Relative: what a frequency may be off by that comes from a sine in FP32."""
_DEEPEST = 4
_SHORT, _SWING = 12, 1e-2
"""Rows of which 16 bits hold the phases nearly, and the deviation of a column that changes."""


class Elsewhere(NamedTuple):
    """A table outside of modules: the path of the first module whose code gets at it, and what is wrong."""

    path: str
    cls: type
    name: str
    said: str
    dtype: str


def rounded_elsewhere(places: Iterable[tuple[str, type]], inside: Collection[int]) -> Iterator[Elsewhere]:
    """Yield the tables outside of modules whose numbers are rounded, or are sines of rounded ones.

    Args:
        places: path and stock class of the modules of a model.
        inside: ids of its modules.
    """
    seen = set[int]()
    for cls, path in {cls: path for path, cls in reversed([*places])}.items():
        try:
            may_be_turned = not bytecode.facts(cls).makes_no_positions
            for name, table in _tables(cls, inside, seen):
                said = _wrong_in(name, table, may_be_turned=may_be_turned)
                if said is not None:
                    yield Elsewhere(path, cls, name, said, dtype_name(table.dtype))
        except Exception:  # somebody's own code raises what it likes
            logger.info("what is outside of a %s cannot be looked at", cls.__name__, exc_info=True)


def add_elsewhere(report: AuditReport, found: Iterable[Elsewhere]) -> None:
    """Add tables to the entries of their modules: unknown, as nobody can say which model reads them."""
    known = {one.path: one for one in report.modules}
    for path, cls, name, said, dtype in found:
        if path not in known:
            known[path] = ModuleAudit(path, class_name(own_class(cls)), None, False)
            report.modules.append(known[path])
        known[path].verdict = worst((known[path].verdict, "unknown"))
        source = f"{said}, kept outside of the model's modules, which its code can read"
        report.findings.append(Finding(path, known[path].module_class, name, "unknown", source, dtype))


def _tables(cls: type, inside: Collection[int], seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield by name the tensors that the code of a class can get at, and no module of the model holds.

    ``seen``: ids of tensors and containers that were looked at, which is added to.
    """
    try:
        found = outside(cls)
    except OutOfReachError:
        return
    functions = list(found.remembering)
    for place in found.places:
        owner, kind = place.owner, type(place.owner)
        if issubclass(kind, nn.Module):
            held = () if id(owner) in inside else tuple(entries(owner))
        else:
            held = tuple(place.items())
            functions += [one for _, value in held if (one := remembering_in(value)) is not None]
        # Other objects may answer to __name__ with code of their own.
        named = owner if issubclass(kind, type | types.FunctionType | types.ModuleType) else kind
        before = "" if owner is None else f"{named.__name__}."
        for name, value in held:
            yield from ((f"{before}{name}", one) for one in _within(value, seen))
    for function in functions:
        name = getattr(function, "__name__", "a function")  # one around an object that is called has none
        for value in gc.get_referents(function):  # its results among them, and a dictionary of those
            if value is not vars(function):
                yield from ((f"{name}()", one) for one in _within(value, seen))
    for value in (*(cell.cell_contents for cell in found.cells), *found.containers):
        yield from (("a closure or default value", one) for one in _within(value, seen))


def _within(value: Any, seen: set[int], depth: int = 0) -> Iterator[Tensor]:
    is_held = type(value) in (*CONTAINERS, tuple) and depth < _DEEPEST and length_of(value) <= _MOST
    if (is_held or _is_table(value)) and id(value) not in seen:
        seen.add(id(value))
        if not is_held:
            yield value
        for one in held_in(value):
            yield from _within(one, seen, depth + 1)


def _is_table(value: Any) -> bool:
    if type(value) is not Tensor or value.is_meta:  # a subclass may run code of its own, or ask other ranks
        return False
    is_number = value.is_floating_point() or value.is_complex()
    return is_number and value.numel() >= _FEWEST and is_readable(value) and not is_given_back(value)


def _wrong_in(name: str, table: Tensor, *, may_be_turned: bool) -> str | None:
    """Say what a table's numbers show, or None.

    ``may_be_turned``: the code that gets at it counts, or takes sines.
    """
    values = in_real_numbers(table.detach()).squeeze()
    if values.dim() == 1:
        if len(values) > _ENOUGH or is_no_position(name) or not rises_or_falls(values):
            return None
        said = damaged_in_itself(name, values.cpu(), is_turned=may_be_turned)
        return said if len(_telling(values)) >= _FEW else None
    while values.dim() > 2 + table.is_complex():
        values = values[0]
    rows = values[:_ENOUGH, :_ENOUGH].cpu().float()
    rows = rows.flatten(1)
    if len(rows) < _FEWEST or not _begins_as_sines(rows):
        return None
    is_whole = torch.equal(rows, rows.round())  # no dtype rounds it
    if not is_whole and (low := low_dtype_of(rows)) is not None:
        return f"{dtype_name(low)}-rounded sines or cosines of positions" if _waves(rows) else None
    first = rows[:_COUNTED]
    if not oscillates(first):
        return None
    if (low := _rounded_frequencies(first)) is not None:
        return f"sines of {dtype_name(low)}-rounded frequencies"
    low = _rounded_positions(rows)
    return None if low is None else f"sines of {dtype_name(low)}-rounded positions"


def _begins_as_sines(rows: Tensor) -> bool:
    """Whether the first row is that of position 0, and no number is larger than its cosines."""
    largest = rows[0].max()
    begins = ((rows[0] == 0) | (rows[0] == largest)).all() if bool(rows[0].any()) else (rows[0] == 0).all()
    bound = largest if bool(rows[0].any()) else rows.new_tensor(1.0)
    return bool(begins & (bound > 0) & (rows.abs() <= bound * 1.01).all() & (rows < 0).any())


def _waves(rows: Tensor) -> bool:
    """Whether most columns that change are sampled sines, as far as 16 bits hold them and their phases."""
    first = rows[:_SHORT].double() / rows[:_SHORT].abs().max()
    swings = first.std(0) > _SWING
    before, middle, after = first[:-2], first[1:-1], first[2:]
    factor = ((before + after) * middle).sum(0) / (middle * middle).sum(0).clamp(min=1e-30)
    is_sine = (before + after - factor * middle).abs().amax(0) < 2 * ROUNDED
    return bool((swings & is_sine).sum() * 2 > swings.sum())


def _telling(values: Tensor) -> set[float]:
    """Return the numbers of more than five bits: shorter ones are written as often as rounded."""
    bits = values.double().frexp().mantissa * 32
    return set(values[bits != bits.round()].tolist())


def _rounded_frequencies(rows: Tensor) -> torch.dtype | None:
    """Return the dtype that has every frequency whose sines stand in the columns; None where none has."""
    amplitude = float(rows[0].max()) or 1.0
    sines = (rows[1, rows[0] == 0].double() / amplitude).abs().clamp(max=1.0).asin()
    sines = sines[(sines > 0) & (sines < 1.0)]
    for low in LOW:
        near = sines.to(low).double()
        steps = torch.tensor(sorted(set(near.tolist())), dtype=torch.float64).diff()
        is_even = bool((steps == steps[:1]).all())
        if not is_even and len(_telling(near)) >= _FEW and bool(((near - sines).abs() <= _OFF * sines).all()):
            return low
    return None


def _rounded_positions(rows: Tensor) -> torch.dtype | None:
    """Return the dtype to which the positions were rounded that have the same rows; None where none was."""
    counted = torch.arange(len(rows))
    if len(rows) <= _COUNTED or torch.equal(rows[_COUNTED], rows[-1]):
        return None
    for low in LOW:
        nearest = counted.to(low).long()
        known = nearest < len(rows)
        if not torch.equal(nearest, counted) and torch.equal(rows[known], rows[nearest[known]]):
            return low
    return None
