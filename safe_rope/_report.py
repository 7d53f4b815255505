"""What a guard or `protect` did: which modules are protected, how, and which are not, and why."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safe_rope.errors import PrecisionWarning
from safe_rope.rewrite import is_pinned

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModuleEntry:
    """One position module: its path, its class, and how it is protected or why it is not.

    ``level`` is "full" (own tables, q and k rotated as asked), "pinned" (the stock computation on tables
    that stay what the constructor makes in FP32 on CPU; ``tables`` names them) or None.
    """

    path: str
    module_class: str
    family: str | None = None
    reason: str | None = None
    level: str | None = None
    tables: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.level == "pinned":
            applied = "" if self.family == "pinned" else ", applied in FP32"
            what = f"rebuilt and pinned: {', '.join(self.tables)}{applied}"
        else:
            what = f"protected as {self.family}" if self.family else f"not protected: {self.reason}"
        return f"{self.path or '(the module itself)'} ({self.module_class}): {what}"


@dataclass
class ProtectionReport:
    """What was protected, with which options, and what was not. ``str()`` is one line a module."""

    tables: str
    apply: str
    protected: list[ModuleEntry] = field(default_factory=list)
    unprotected: list[ModuleEntry] = field(default_factory=list)

    def add(self, path: str, module: nn.Module) -> None:
        """Add a module that is protected fully or pinned."""
        state: Any = module._safe_rope
        if is_pinned(module):
            tables = tuple(state.pins)
            family = "pinned" if state.patch is None else state.patch.family
            entry = ModuleEntry(path, _class_name(module), family=family, level="pinned", tables=tables)
        else:
            entry = ModuleEntry(path, _class_name(module), family=state.patch.family, level="full")
        self.protected.append(entry)

    def add_unprotected(self, path: str, module: nn.Module, reason: str) -> None:
        """Add a position module that cannot be protected."""
        reason = f"{reason}; register a RopePatch for its class (safe_rope.registry.register)"
        self.unprotected.append(ModuleEntry(path, _class_name(module), reason=reason))

    def describe_unprotected(self) -> str:
        """Say in one message which position modules are not protected, and what to do."""
        lines = "; ".join(str(entry) for entry in self.unprotected)
        return f"{len(self.unprotected)} position module(s) keep their stock tables: {lines}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            "tables": self.tables,
            "apply": self.apply,
            "protected": [vars(entry) | {} for entry in self.protected],
            "unprotected": [vars(entry) | {} for entry in self.unprotected],
        }

    def __str__(self) -> str:
        head = (
            f"{len(self.protected)} position module(s) protected (tables={self.tables}, apply={self.apply}), "
            f"{len(self.unprotected)} not"
        )
        return "\n".join([head, *(f"  {entry}" for entry in (*self.protected, *self.unprotected))])


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


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
