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

from torch import Tensor, nn

from safe_rope._audit.by_numbers import wrong_in
from safe_rope._audit.report import AuditReport, Finding, ModuleAudit, worst
from safe_rope._base import bytecode
from safe_rope._base.containers import held_in, length_of
from safe_rope._base.dtypes import dtype_name
from safe_rope._base.tensors import is_given_back
from safe_rope._base.text import class_name
from safe_rope._recognition.holdings import entries
from safe_rope._recognition.outside import CONTAINERS, OutOfReachError, outside, remembering_in
from safe_rope._recognition.reference import own_class
from safe_rope._recognition.tables import is_readable

logger = logging.getLogger(__name__)

_FEWEST = 8
"""Numbers of a table."""
_MOST = 2048
"""Values of a container that is looked into."""
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
        try:
            may_be_turned = not bytecode.facts(cls).makes_no_positions
            for name, table in _tables(cls, inside, seen):
                said = wrong_in(name, table, may_be_turned=may_be_turned)
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
