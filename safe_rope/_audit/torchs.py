"""Rounded frequencies in modules of torch's own: traced, exported or scripted ones, and bare ones."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx, nn

from safe_rope._audit.report import AuditReport, Finding, ModuleAudit
from safe_rope._audit.tables import damaged_in_itself
from safe_rope._base.dtypes import dtype_name
from safe_rope._base.text import class_name
from safe_rope._recognition.reference import own_class
from safe_rope._recognition.tables import is_frequency, is_readable
from safe_rope.rotation import plain

_SINES = ("sin", "cos", "polar")


def add_rounded(report: AuditReport, path: str, module: nn.Module) -> None:
    """Add what the numbers alone show of a module that torch has made: no constructor gives it again.

    Frequencies by name are damaged; other numbers that a graph may take sines of are unknown.
    """
    if not own_class(type(module)).__module__.startswith("torch."):
        return
    known = {f"{one.path}.{one.what}".removeprefix(".") for one in report.findings}
    found = []
    for name, tensor in _tensors(module):
        whole = f"{path}.{name}".removeprefix(".")
        if whole in known or tensor.is_meta or not is_readable(tensor):
            continue
        said = damaged_in_itself(name, plain(tensor).detach().cpu(), is_turned=_takes_sines(module))
        if said is not None:
            severity = "damaged" if is_frequency(name) else "unknown"
            kind = class_name(type(module))
            found.append(Finding(path, kind, name, severity, said, dtype_name(tensor.dtype)))  # type: ignore[arg-type]
    if found:
        verdict = "damaged" if any(one.severity == "damaged" for one in found) else "unknown"
        report.modules.append(ModuleAudit(path, found[0].module_class, None, False, verdict))  # type: ignore[arg-type]
        report.findings += found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    is_turned = _takes_sines(module)
    for name, tensor in module.named_buffers(recurse=False):
        if (is_frequency(name) or is_turned) and tensor.is_floating_point() and tensor.dim() > 0:
            yield name, tensor


def _takes_sines(module: nn.Module) -> bool:
    if not isinstance(module, fx.GraphModule):
        return False
    names = (getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes)
    return any(name.partition(".")[0] in _SINES for name in names)
