"""Integers that a constructor makes for whoever looks them up, and numbers, where others stand now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safe_rope._audit.report import AuditReport, Finding, ModuleAudit, Severity, Where, worst
from safe_rope._base import bytecode
from safe_rope._base.dtypes import dtype_name
from safe_rope._base.text import class_name
from safe_rope._recognition.explained import is_cast
from safe_rope._recognition.integers import integers, is_counted, is_from_zero, is_moved, made_for
from safe_rope._recognition.provenance import Origin
from safe_rope._recognition.reference import Reference, own_class, stock_class
from safe_rope._recognition.tables import is_library_module, is_readable, is_state

_FARTHEST = 2**27
"""The bits of most floating numbers, read as an integer, are more."""
_SMALLEST = 1e-30
"""A number of a formula, other than 0, is no smaller."""
_LOW = "computed in 16 bits (constructor intercepted or default dtype)"
_AVERAGED = "some of its integers are off by one, as a moving average that is truncated leaves them"
_SAID = (
    "its constructor makes other numbers there: memory that was never filled "
    "(made on the meta device, then to_empty), or somebody's intent"
)


def add_lost_counts(report: AuditReport, path: str, module: nn.Module, find: Callable[[], Reference]) -> None:
    """Add the integers of a module that are others than its constructor makes.

    Damaged are those that it makes in 16 bits. Those that no checkpoint holds are unknown where they are what
    fresh memory holds; or stand in no order, where all that their constructor was given is known. So are all
    of which some are one too near to zero, rows of others, and single numbers in no file. Those last are,
    too, where they are 0 or no number, whatever the constructor was given.
    ``find`` returns what the constructor makes.
    """
    stock: Any = stock_class(module)
    held = {
        name: value
        for name, value in integers(module)
        if _is_unfilled(module, name, value) or (bytecode.may_count(stock) and not is_from_zero(value))
    }
    held.update(_numbers(module))
    reference = find() if held else Reference(None)
    built = reference.module
    if built is None or built is module:
        return
    kind, again = class_name(own_class(stock)), reference.again
    is_complete = again is not None and again.complete
    known = {(one.path, one.what) for one in report.findings}
    for name, value in held.items():
        made = made_for(name, value, reference)
        if made is None or (path, name) in known or torch.equal(value.cpu(), made.to(value.dtype)):
            continue
        origin = reference.origin(name)
        counted = is_counted(origin) and not value.is_floating_point()
        kept = name not in module._non_persistent_buffers_set
        severity: Severity = "unknown"
        where: Where | None = None
        if counted and is_moved(name, value, reference):
            said, severity, where = _LOW, "damaged", "constructor"
        elif counted and _is_truncated(value, made):
            said = _AVERAGED
        elif _is_another(value, made, origin, is_complete=is_complete, is_kept=kept):
            said = _SAID
        else:
            continue
        finding = Finding(path, kind, name, severity, said, dtype_name(value.dtype), where=where)
        report.findings.append(finding)
        entry = next((one for one in report.modules if one.path == path), None)
        if entry is None:
            report.modules.append(entry := ModuleAudit(path, kind, None, False))
        entry.verdict = worst((entry.verdict, finding.severity))


def _numbers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the single numbers in no file of a module that counts when it is called, and changes none."""
    stock: Any = stock_class(module)
    if is_library_module(module) or not bytecode.facts(stock).counts_when_called:
        return
    for name in sorted(module._non_persistent_buffers_set):
        value = module._buffers.get(name)
        if type(value) is not Tensor or value.is_meta or not is_readable(value) or value.numel() != 1:
            continue
        if value.is_floating_point() and not is_state(module, name):
            yield name, value


def _is_another(value: Tensor, made: Tensor, origin: Origin, *, is_complete: bool, is_kept: bool) -> bool:
    """Whether what a module holds has no other source than its constructor, which makes something else.

    ``is_complete``: all that the constructor was given is known. ``is_kept``: a checkpoint holds it.
    """
    if value.is_floating_point():
        is_drawn = bool(origin & (Origin.RANDOM | Origin.EMPTY))
        is_lost = math.isnan(value) or (_is_nothing(value) and not _is_nothing(made))
        is_off = is_complete or is_lost
        return is_off and not is_drawn and not is_cast(value.cpu(), made)
    is_told = is_counted(origin) and is_complete
    if is_told and _are_other_rows(value, made):
        return True
    is_hashing = is_complete and _is_hashing(made, origin)
    return not is_kept and (is_hashing or _is_lost(value, made, is_told))


def _is_nothing(number: Tensor) -> bool:
    """Whether a number is none, or as small as what fresh memory holds."""
    return not _SMALLEST < abs(float(number)) < math.inf


def _are_other_rows(value: Tensor, made: Tensor) -> bool:
    """Whether integers in rows and columns are others than made, and not all by one number."""
    off = value.cpu().long() - made.long()
    return value.squeeze().dim() > 1 and bool((off != off.reshape(-1)[0]).any())


def _is_hashing(made: Tensor, origin: Origin) -> bool:
    """Whether integers are written in a constructor and too large for places, as the primes of a hash."""
    return bool(origin & Origin.LITERAL) and not origin & Origin.RANDOM and int(made.max()) > _FARTHEST


def _is_truncated(value: Tensor, made: Tensor) -> bool:
    """Whether some of the constructor's integers are one nearer to zero, each number wherever it stands."""
    made = made.long()
    off = made - value.cpu()
    is_nearer = bool(((off == 0) | (off == made.sign())).all()) and not bool(off.all())
    return is_nearer and len(torch.unique(2 * made + off)) == len(torch.unique(made))


def _is_lost(value: Tensor, made: Tensor, is_counted: bool) -> bool:
    """Whether integers are what fresh memory holds; or in no order, where others are counted."""
    if _is_as_never_filled(value):
        return not _is_as_never_filled(made)
    steps = value.squeeze().diff()
    return is_counted and not (bool((steps >= 0).all()) or bool((steps <= 0).all()))


def _is_unfilled(module: nn.Module, name: str, value: Tensor) -> bool:
    return name in module._non_persistent_buffers_set and _is_as_never_filled(value)


def _is_as_never_filled(value: Tensor) -> bool:
    """Whether integers are one number everywhere, or no places in a sequence, and do not count."""
    least, most = (int(one) for one in value.aminmax())
    return least == most or ((least < 0 or most > _FARTHEST) and not _is_count(value))


def _is_count(value: Tensor) -> bool:
    """Whether each row of integers rises or falls by one and the same number from each to the next."""
    steps = value.squeeze().diff()
    return steps.numel() > 0 and bool((steps == steps.reshape(-1)[0]).all()) and bool(steps.any())
