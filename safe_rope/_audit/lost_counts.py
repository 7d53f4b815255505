"""Integers that a constructor makes for whoever looks them up, where other numbers stand now."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from safe_rope._audit.report import AuditReport, Finding, ModuleAudit, worst
from safe_rope._base.dtypes import dtype_name
from safe_rope._base.tensors import is_given_back
from safe_rope._base.text import class_name
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import Reference, own_class, stock_class
from safe_rope._recognition.tables import is_library_module, is_readable, is_state

_INTEGERS = (torch.int32, torch.int64)
_MOST = 2**22
_FARTHEST = 2**27
"""The bits of most floating numbers, read as an integer, are more."""
_SAID = (
    "its constructor makes other integers there: memory that was never filled "
    "(made on the meta device, then to_empty), or somebody's intent"
)


def add_lost_counts(report: AuditReport, path: str, module: nn.Module, find: Callable[[], Reference]) -> None:
    """Add the buffers of integers that hold what fresh memory does, and are to hold others: they are unknown.

    ``find`` returns what the module's constructor makes; it is asked where a buffer may be one of them.
    """
    integers = {name: value for name, value in _integers(module) if _is_as_never_filled(value)}
    built = find().module if integers else None
    if built is None:
        return
    kind = class_name(own_class(stock_class(module)))
    known = {(one.path, one.what) for one in report.findings}
    for name, value in integers.items():
        made = get_table(built, name)
        is_told = isinstance(made, Tensor) and not made.is_meta and made.shape == value.shape
        if not is_told or (path, name) in known or _is_as_never_filled(made):
            continue
        report.findings.append(Finding(path, kind, name, "unknown", _SAID, dtype_name(value.dtype)))
        entry = next((one for one in report.modules if one.path == path), None)
        if entry is None:
            report.modules.append(entry := ModuleAudit(path, kind, None, False))
        entry.verdict = worst((entry.verdict, "unknown"))


def _integers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what no checkpoint holds and no forward changes."""
    if is_library_module(module):
        return
    for name, value in module._buffers.items():
        if type(value) is not Tensor or value.is_meta or is_given_back(value) or not is_readable(value):
            continue
        is_made = name in module._non_persistent_buffers_set and not is_state(module, name)
        if is_made and value.dtype in _INTEGERS and 2 < value.numel() <= _MOST:
            yield name, value


def _is_as_never_filled(value: Tensor) -> bool:
    """Whether integers are one number everywhere, or no places in a sequence, and do not count."""
    least, most = (int(one) for one in value.aminmax())
    return least == most or ((least < 0 or most > _FARTHEST) and not _is_count(value))


def _is_count(value: Tensor) -> bool:
    """Whether each row of integers rises or falls by one and the same number from each to the next."""
    steps = value.squeeze().diff()
    return steps.numel() > 0 and bool((steps == steps.reshape(-1)[0]).all()) and bool(steps.any())
