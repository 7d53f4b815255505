"""Rounded positions in modules of torch's own: traced, exported or scripted ones, and bare ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from safe_rope._audit.report import AuditReport, Finding, ModuleAudit
from safe_rope._audit.tables import damaged_in_itself
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.text import class_name
from safe_rope._recognition.reference import own_class
from safe_rope._recognition.tables import is_frequency, is_readable
from safe_rope.rotation import plain

_SINES = ("sin", "cos", "polar")
_FEWEST, _ENOUGH = 8, 1024
"""Rows that show whether columns turn."""
_ROUNDING = max(torch.finfo(dtype).eps for dtype in LOW)


def add_rounded(report: AuditReport, path: str, module: nn.Module) -> None:
    """Add what the numbers alone show of a module that torch has made: no constructor gives it again.

    Frequencies by name are damaged; other numbers that a graph may take sines of, and sines and cosines of
    successive positions, are unknown.
    """
    if not own_class(type(module)).__module__.startswith("torch."):
        return
    known = {f"{one.path}.{one.what}".removeprefix(".") for one in report.findings}
    found = []
    for name, tensor in _tensors(module):
        whole = f"{path}.{name}".removeprefix(".")
        if whole in known or tensor.is_meta or not is_readable(tensor):
            continue
        is_turned = _takes_sines(module)
        values, said = plain(tensor).detach(), None
        if is_turned or is_frequency(name):
            said = damaged_in_itself(name, values.cpu(), is_turned=is_turned)
        said = said or _rounded_rows(values)
        if said is not None:
            severity = "damaged" if is_frequency(name) else "unknown"
            kind = class_name(type(module))
            found.append(Finding(path, kind, name, severity, said, dtype_name(tensor.dtype)))  # type: ignore[arg-type]
    if found:
        verdict = "damaged" if any(one.severity == "damaged" for one in found) else "unknown"
        report.modules.append(ModuleAudit(path, found[0].module_class, None, False, verdict))  # type: ignore[arg-type]
        report.findings += found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.named_buffers(recurse=False):
        if tensor.is_floating_point() and tensor.dim() > 0:
            yield name, tensor


def _rounded_rows(table: Tensor) -> str | None:
    """Say that a table is one of rounded sines or cosines of successive positions, or None."""
    rows = table.squeeze()
    if rows.dim() < 2 or len(rows) < _FEWEST:
        return None
    rows = rows[:_ENOUGH].cpu()
    is_whole = torch.equal(rows, rows.round())  # no dtype rounds it
    if is_whole or (low := low_dtype_of(rows)) is None or not _turns(rows.flatten(1).double()):
        return None
    return f"{dtype_name(low)}-rounded sines or cosines of positions"


def _turns(values: Tensor) -> bool:
    """Whether each column of values [n, m] turns by one angle at each step, and one of them clearly does.

    Of cos(n·a) and sin(n·a) the sum of both neighbours is 2·cos(a) times what stands between them. Both have
    both signs, which windows and kernels that only rise and fall have not.
    """
    between, around = values[1:-1], values[:-2] + values[2:]
    factors = (between * around).sum(0) / between.square().sum(0)
    left = (around - factors * between).abs().amax(0)
    is_turning = left <= 4 * _ROUNDING * values.abs().amax(0)
    is_clear = (factors.abs() < 2 - _ROUNDING) & (values.amin(0) < 0) & (values.amax(0) > 0)
    return bool((is_turning | (values == 0).all(0)).all()) and bool(is_clear.any())


def _takes_sines(module: nn.Module) -> bool:
    if not isinstance(module, fx.GraphModule):
        return False
    names = (getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes)
    return any(name.partition(".")[0] in _SINES for name in names)
