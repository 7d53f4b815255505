"""What a guard or `protect` did: which modules are protected, how, and which are not, and why."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safe_rope._base.dtypes import LOW
from safe_rope._base.text import Report, class_name, counted, wrapped
from safe_rope._protection.rewrite import is_pinned
from safe_rope._recognition.explained import UNKNOWN
from safe_rope._recognition.reference import own_class
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation import _installed

if TYPE_CHECKING:
    from torch import nn

    from safe_rope._protection.frozen import Frozen

SCHEMA = "safe_rope.protection/1"


@dataclass(frozen=True)
class ModuleEntry:
    """One position module: its path, its class, and how it is protected or why it is not.

    ``level`` is "full" (own tables), "pinned" (the stock computation on tables that stay what the
    constructor makes in FP32 on CPU; ``tables`` names them), "kept" (``tables`` hold what they held, in full
    precision, and nobody can say whether that is correct) or None. ``apply`` is "fp32" where q and k are
    rotated in FP32, "stock" where cos and sin are rounded and applied as the stock model does it. ``reason``
    says why a module is not protected, or which of its tables hold values that its constructor does not
    give.
    """

    path: str
    module_class: str
    family: str | None = None
    reason: str | None = None
    level: str | None = None
    tables: tuple[str, ...] = ()
    apply: str | None = None

    def said(self, tables: str) -> str:
        """Say in a few words what is true of a protected module, whose own tables are of kind ``tables``."""
        kept = f"{tables} tables" if self.level == "full" else "own tables kept"
        return f"{self.family}: {kept}, {'rotated in FP32' if self.apply == 'fp32' else 'applied as stock'}"

    def __str__(self) -> str:
        if self.level is None:
            what = f"not protected: {self.reason}"
        elif self.level == "kept":
            what = f"kept, cannot be judged: {self.reason}"
        else:
            tables = ", ".join(self.tables) or "what its forward makes"
            what = (
                f"rebuilt and pinned: {tables}" if self.level == "pinned" else f"protected as {self.family}"
            )
            what += ", applied in FP32" if self.apply == "fp32" else ", applied as stock"
            what += f" ({self.reason})" if self.reason else ""
        return f"{self.path or '(the module itself)'} ({self.module_class}): {what}"


@dataclass(repr=False)
class ProtectionReport(Report):
    """What was protected, with which options, and what was not. ``str()`` is an entry a module.

    ``left`` names position tables that are parts of the model like any other: frozen parameters.
    """

    tables: str
    apply: str
    protected: list[ModuleEntry] = field(default_factory=list)
    unprotected: list[ModuleEntry] = field(default_factory=list)
    left: list[ModuleEntry] = field(default_factory=list)

    def add(self, path: str, module: nn.Module) -> None:
        """Add a module that is protected fully or pinned."""
        state: Any = module._safe_rope
        name, family = class_name(type(module)), None if state.applied is None else state.applied.family
        pins = state.pins if is_pinned(module) else {}
        full = not is_pinned(module)
        notes = {table: why for table, why in state.notes.items() if why not in UNKNOWN}
        exact = {n: why for n, why in notes.items() if full or (n in pins and not _is_low(pins[n]))}
        reason = _listed(exact, "; kept in full precision") if exact else None
        others = {table: why for table, why in state.notes.items() if table not in exact}
        kept = {table: why for table, why in others.items() if table in pins}
        family, apply, said = family or "pinned", *_application(state, full)
        reason = "; ".join(filter(None, (reason, said))) or None
        if not full:
            entry = ModuleEntry(
                path, name, family, reason, "pinned", tuple(name for name in pins if name not in kept), apply
            )
        else:
            entry = ModuleEntry(path, name, family, reason, "full", apply=apply)
        if entry.tables or full or (not kept and state.applied is not None):
            self.protected.append(entry)
        if kept:
            self.add_unprotected(path, module, _listed(kept, ""), tuple(kept))
        if len(others) > len(kept):
            lost = {table: why for table, why in others.items() if table not in kept}
            self.add_unprotected(path, module, _listed(lost, ""))

    def add_unprotected(self, path: str, module: nn.Module, reason: str, kept: tuple[str, ...] = ()) -> None:
        """Add a position module that cannot be protected, or whose tables ``kept`` nobody can judge."""
        reason = f"{reason}; register a RopePatch for its class (safe_rope.registry.register)"
        level = "kept" if kept else None
        self.unprotected.append(ModuleEntry(path, class_name(type(module)), None, reason, level, kept))

    def add_frozen(self, path: str, found: Frozen) -> None:
        """Add a position table that nothing keeps, unless the report names it already."""
        if any(entry.path == path and found.name in (entry.reason or "") for entry in self.unprotected):
            return
        reason = f"{found.name} {found.reason}"
        entries = self.unprotected if found.is_damaged else self.left
        entries.append(ModuleEntry(path, class_name(own_class(type(found.module))), reason=reason))

    def describe_unprotected(self) -> str:
        """Say in one message which position modules are not protected, and what to do."""
        lines = "; ".join(str(entry) for entry in self.unprotected)
        return f"{counted(len(self.unprotected), 'position module')} with stock tables: {lines}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            "schema": SCHEMA,
            "tables": self.tables,
            "apply": self.apply,
            "protected": [vars(entry) | {} for entry in self.protected],
            "unprotected": [vars(entry) | {} for entry in self.unprotected],
            "left": [vars(entry) | {} for entry in self.left],
        }

    def __str__(self) -> str:
        head = (
            f"{counted(len(self.protected), 'position module')} protected, {len(self.unprotected)} not "
            f"(tables={self.tables}, apply={self.apply})"
        )
        entries = (*self.protected, *self.unprotected, *self.left)
        return "\n".join([head, *(line for entry in entries for line in wrapped(f"  {entry}"))])


def _application(state: Any, full: bool) -> tuple[str, str | None]:
    """Return how the positions of a module are applied, and which functions run as in stock beside others."""
    applied = state.applied
    if applied is None or (full and state.apply == "stock"):
        return "stock", None
    if applied.how == "methods":
        return "fp32", None
    is_stock, names = _installed.as_stock(applied.places)
    if is_stock:
        said = f"{', '.join(names)} may do more than rotate" if names else None
        return "stock", said
    return "fp32", f"{', '.join(names)} as in stock" if names else None


def _is_low(pin: Any) -> bool:
    return pin.values.dtype in LOW


def _listed(notes: dict[str, str], end: str) -> str:
    return "; ".join(f"{name}: {why}" for name, why in notes.items()) + end


# torchrun, deepspeed and accelerate set the first; mpirun and srun, without them, one of the others.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def is_main_rank() -> bool:
    """Whether this process is rank 0, or not part of a distributed run."""
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0")
    return rank in ("0", "-1")


def warn_unprotected(report: ProtectionReport, stacklevel: int) -> None:
    """Warn once, on rank 0, about what is not protected; ``stacklevel`` as for `warnings.warn`."""
    if is_main_rank():
        warnings.warn(report.describe_unprotected(), PrecisionWarning, stacklevel=stacklevel)
