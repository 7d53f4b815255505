"""Tables outside of modules that a model's code reads: on classes, in globals, in what functions remember.

No constructor of a module tells what those should hold, and several models may share one. Their numbers alone
say that they are rounded, or are sines of what was rounded.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from safe_rope._audit.report import AuditReport, Finding, ModuleAudit, worst
from safe_rope._audit.tables import damaged_in_itself
from safe_rope._base import bytecode
from safe_rope._base.containers import held_in
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.tensors import in_real_numbers
from safe_rope._base.text import class_name
from safe_rope._recognition.holdings import entries
from safe_rope._recognition.outside import CONTAINERS, OutOfReachError, outside, remembering_in
from safe_rope._recognition.reference import own_class
from safe_rope._recognition.tables import is_no_position, is_readable
from safe_rope._recognition.waves import oscillates, rises_or_falls
from safe_rope.rotation import plain

_FEWEST, _ENOUGH = 8, 4096
"""Rows of a table that are looked at."""
_COUNTED = 256
"""Positions that every 16-bit dtype counts."""
_FEW = 4
"""Frequencies that no chance makes those of a 16-bit dtype."""
_OFF = 2.0**-21
"""Relative: what a frequency may be off by that comes from a sine in FP32."""
_DEEPEST = 4


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
        may_be_turned = not bytecode.facts(cls).makes_no_positions
        for name, table in _tables(cls, inside):
            if id(table) not in seen:
                seen.add(id(table))
                said = _wrong_in(name, table, may_be_turned=may_be_turned)
                if said is not None:
                    yield Elsewhere(path, cls, name, said, dtype_name(table.dtype))


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


def _tables(cls: type, inside: Collection[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield by name the tensors that the code of a class can get at, and no module of the model holds."""
    try:
        found = outside(cls)
    except OutOfReachError:
        return
    functions = list(found.remembering)
    for place in found.places:
        owner = place.owner
        if isinstance(owner, nn.Module):
            held = () if id(owner) in inside else tuple(entries(owner))
        else:
            held = tuple(place.items())
            functions += [one for _, value in held if (one := remembering_in(value)) is not None]
        named = owner if hasattr(owner, "__name__") else type(owner)
        before = "" if owner is None else f"{named.__name__}."
        for name, value in held:
            yield from ((f"{before}{name}", one) for one in _within(value))
    for function in functions:
        for value in gc.get_referents(function):  # its results among them, and a dictionary of those
            if value is not vars(function):
                yield from ((f"{function.__name__}()", one) for one in _within(value))
    for value in (*(cell.cell_contents for cell in found.cells), *found.containers):
        yield from (("a closure or default value", one) for one in _within(value))


def _within(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if _is_table(value):
        yield value
    elif depth < _DEEPEST and type(value) in (*CONTAINERS, tuple):
        for one in held_in(value):
            yield from _within(one, depth + 1)


def _is_table(value: Any) -> bool:
    if not issubclass(type(value), Tensor) or isinstance(value, nn.Parameter) or value.is_meta:
        return False
    is_number = value.is_floating_point() or value.is_complex()
    return is_number and value.numel() >= _FEWEST and is_readable(value)


def _wrong_in(name: str, table: Tensor, *, may_be_turned: bool) -> str | None:
    """Say what a table's numbers show, or None.

    ``may_be_turned``: the code that gets at it counts, or takes sines.
    """
    values = in_real_numbers(plain(table).detach()).squeeze()
    if values.dim() == 1:
        if is_no_position(name) or not rises_or_falls(values):
            return None
        return damaged_in_itself(name, values.cpu(), is_turned=may_be_turned)
    rows = values.flatten(-2) if table.is_complex() else values
    rows = rows.reshape(-1, *rows.shape[-2:])[0][:_ENOUGH].float().cpu() if rows.dim() > 1 else rows
    if rows.dim() != 2 or len(rows) < _FEWEST or not _begins_as_sines(rows):
        return None
    is_whole = torch.equal(rows, rows.round())  # no dtype rounds it
    if not is_whole and (low := low_dtype_of(rows)) is not None:
        return f"{dtype_name(low)}-rounded sines or cosines of positions"
    first = rows[:_COUNTED]
    if not oscillates(first):
        return None
    if (low := _rounded_frequencies(first)) is not None:
        return f"sines of {dtype_name(low)}-rounded frequencies"
    repeated = (rows[_COUNTED:] == rows[_COUNTED - 1 : -1]).all(-1) & rows[_COUNTED:].any(-1)
    return "sines of rounded positions" if bool(repeated.any()) else None


def _begins_as_sines(rows: Tensor) -> bool:
    """Whether the first row is that of position 0, and no number is larger than its cosines."""
    largest = rows[0].max()
    begins = ((rows[0] == 0) | (rows[0] == largest)).all() if bool(rows[0].any()) else (rows[0] == 0).all()
    bound = largest if bool(rows[0].any()) else rows.new_tensor(1.0)
    return bool(begins & (bound > 0) & (rows.abs() <= bound * 1.01).all() & (rows < 0).any())


def _rounded_frequencies(rows: Tensor) -> torch.dtype | None:
    """Return the dtype that has every frequency whose sines stand in the columns; None where none has."""
    amplitude = float(rows[0].max()) or 1.0
    sines = (rows[1, rows[0] == 0].double() / amplitude).abs().clamp(max=1.0).asin()
    sines = sines[(sines > 0) & (sines < 1.0)]
    sines = sines[sines.frexp().mantissa != 0.5]
    if len(set(sines.tolist())) < _FEW:
        return None
    for low in LOW:
        if bool(((sines.to(low).double() - sines).abs() <= _OFF * sines).all()):
            return low
    return None
