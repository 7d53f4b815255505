"""What an audit found: findings, one row for each measured position, and their text and JSON forms."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from safe_rope._base.text import Report, aligned, counted, shortened, wrapped
from safe_rope.errors import DamagedTablesError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

Tables: TypeAlias = "dict[str, dict[str, Tensor]]"
Severity = Literal["damaged", "note", "unknown"]
Verdict = Literal["ok", "damaged", "unknown"]
Where = Literal[
    "constructor", "module cast", "initialize", "loading", "cache rebuild", "forward", "application"
]

SCHEMA = "safe_rope.audit/2"
BAD_RADIANS = 0.1
"""The phase error from which a position counts as bad."""

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """One thing about one module that holds positions, which somebody should know.

    Attributes:
        path: the module's path in the model.
        module_class: the module's class, with its Python module.
        what: the table ("inv_freq", "cos_cached, sin_cached"), "forward" or "application".
        severity: "damaged": the positions are wrong. "unknown": the audit cannot tell. "note": neither.
        source: where it comes from, in words.
        where: the step that did it, where that can be told: "constructor", "module cast", "initialize"
            (of DeepSpeed; told by `safe-rope audit`, which looks before and after), "loading" (values that
            nothing computed: uninitialised or overwritten), "cache rebuild" (for a sequence longer than the
            cached tables), "forward" (right tensors, wrong arithmetic) or "application" (q and k).
        dtype: the dtype of what was measured.
        phase_error_rad: the largest error of a phase, in radians; see `safe_rope.audit`.
        cos_error: the largest absolute error of cos or sin, where these were measured.
        first_bad_position: the first position whose phase is off by more than 0.1 rad; exact for
            ``*inv_freq``, for ready tables and for a ``forward`` that computes from a damaged inv_freq, else
            the first measured one.
        first_damaged_position: the first measured position beyond the tolerance.
        protected: whether the module is protected by safe_rope.
        relative_error: the largest relative error of a frequency.
        layer_type: which of the module's rotary embeddings, where it has several.
    """

    path: str
    module_class: str
    what: str
    severity: Severity
    source: str
    dtype: str | None = None
    phase_error_rad: float | None = None
    cos_error: float | None = None
    first_bad_position: int | None = None
    first_damaged_position: int | None = None
    protected: bool = False
    where: Where | None = None
    relative_error: float | None = None
    layer_type: str | None = None

    def describe(self) -> str:
        """Return the finding in one line, without its path."""
        parts = [f"{self.severity}: {self.what}: {self.source}"]
        measured = (
            ("phase error {:.3g} rad", self.phase_error_rad),
            ("cos error {:.3g}", self.cos_error),
            ("wrong from position {}", self.first_damaged_position),
            ("over 0.1 rad from {}", self.first_bad_position),
        )
        parts += [said.format(value) for said, value in measured if value is not None]
        return "; ".join(parts)


@dataclass(frozen=True)
class MeasuredRow:
    """What ``forward`` returned for one position, against float64.

    Attributes:
        position: the position.
        phase_error_rad: the largest error of a phase; where the module does not tell the frequencies that it
            multiplied, whole turns stay unseen, and it is at most pi.
        cos_error: the largest absolute error of cos or sin.
        layer_type: which of the module's rotary embeddings, where it has several.
        within_tolerance: whether correct FP32 arithmetic explains the error.
        matters: whether the position is within the distance that the layers attend over; an error that
            grows with the distance has no effect beyond it.
    """

    position: int
    phase_error_rad: float
    cos_error: float
    within_tolerance: bool
    layer_type: str | None = None
    matters: bool = True


@dataclass
class ModuleAudit:
    """One module that holds positions: its verdict and what was measured.

    Attributes:
        path: the module's path in the model that was given.
        module_class: its class, with its Python module.
        family: the family of the patch that covers it, or None.
        protected: whether it is protected by safe_rope.
        verdict: "damaged", "unknown" or "ok".
        guard: what the guard does, or would do, about it, in words.
        rows: what ``forward`` returned, a row for each position.
        max_position_embeddings: the longest sequence that its config announces.
    """

    path: str
    module_class: str
    family: str | None
    protected: bool
    verdict: Verdict = "ok"
    guard: str = ""
    rows: list[MeasuredRow] = field(default_factory=list)
    max_position_embeddings: int | None = None

    @property
    def worst(self) -> MeasuredRow | None:
        """The row with the largest phase error, among those that matter."""
        rows = [row for row in self.rows if row.matters] or self.rows
        return max(rows, key=lambda row: (row.phase_error_rad, row.cos_error), default=None)


@dataclass(repr=False)
class AuditReport(Report):
    """Every module of a model that holds positions, measured. ``str()`` is plain text of 98 columns.

    Attributes:
        model_class: the class of the model that was audited, without what is wrapped around it.
        wrappers: the classes around it, from the outside in: an engine, FSDP, PEFT, a compiled model.
        tables: for each rotary embedding, by its module's path, what ``forward`` returned, or turned q by:
            "positions" int64 CPU ``[n]``, rising, "cos" and "sin" FP32 CPU ``[n, rotary_dim // 2]``, one
            value of each pair. That of a layer type has "layers" too: the numbers of its layers.
        tolerance: relative to a phase, and absolute for phases below 1 rad.
        findings: what was found, in the order of the modules.
        modules: one entry a module that holds positions, whether something was found or not.
    """

    model_class: str
    tolerance: float
    findings: list[Finding] = field(default_factory=list)
    modules: list[ModuleAudit] = field(default_factory=list)
    wrappers: tuple[str, ...] = ()
    tables: Tables = field(default_factory=dict, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and nothing stayed unknown."""
        return self.verdict == "ok"

    @property
    def damaged(self) -> list[Finding]:
        """The findings of severity "damaged"."""
        return [finding for finding in self.findings if finding.severity == "damaged"]

    def add_unmeasured(self, path: str, module_class: str, error: BaseException) -> None:
        """Add a module that raises whatever is asked of it: nobody can say whether it is right."""
        said = f"it cannot be measured: {type(error).__name__}: {error}"
        self.modules.append(ModuleAudit(path, module_class, None, False, "unknown"))
        self.findings.append(Finding(path, module_class, "module", "unknown", said))

    def raise_if_damaged(self, unknown: bool = False) -> None:
        """Raise if a position table is wrong.

        Args:
            unknown: raise, too, if that cannot be told of a table.

        Raises:
            DamagedTablesError: names the tables, where the damage comes from, and the remedy.
        """
        wrong = self.damaged or [f for f in self.findings if unknown and f.severity == "unknown"]
        if not wrong:
            return
        count = len({finding.path for finding in wrong})
        facts = _merged((f.path, f.describe()) for f in joined(wrong))
        lines = [f"  {path}: {said}" for path, said in facts]
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"  and {len(lines) - _SHOWN} more; see the report's findings"]
        raise DamagedTablesError(
            f"expected position tables within FP32 arithmetic of what {self.model_class} asks "
            f"for, got {count} of {len(self.modules)} modules {wrong[0].severity}; build the model inside "
            "safe_rope.guard(), or repair it with safe_rope.protect(model):\n" + "\n".join(lines)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for strict JSON; a number that is not finite becomes None."""
        return {
            "schema": SCHEMA,
            "model_class": self.model_class,
            "wrappers": list(self.wrappers),
            "ok": self.ok,
            "tolerance": self.tolerance,
            "findings": [plain(finding) for finding in self.findings],
            "modules": [plain(module) for module in self.modules],
        }

    def dump(self, path: str | Path) -> None:
        """Write `tables` as safetensors, for ``safe-rope compare``, at once or not at all.

        Every position that ``audit(model, positions=...)`` measured is in it; two dumps are compared where
        they have positions in common.

        Raises:
            UnsupportedModelError: no table was measured.
            OSError: the file cannot be written.
        """
        from safe_rope._audit.command.dump import save

        if not self.tables:
            raise UnsupportedModelError(f"{path} is not written: no table of {self.model_class} was measured")
        save(Path(path), {"": self.tables}, self.model_class)

    @property
    def verdict(self) -> Verdict:
        """The worst of all findings."""
        return worst(finding.severity for finding in self.findings)

    @property
    def max_phase_error_rad(self) -> float:
        """The largest error that was measured, in radians; of ready tables, of their values."""
        rows = [row.phase_error_rad for module in self.modules if (row := module.worst) is not None]
        found = [max(f.phase_error_rad or 0.0, f.cos_error or 0.0) for f in self.damaged]
        return max((*rows, *found), default=0.0)

    def _title(self) -> str:
        around = ", ".join(_short(name) for name in self.wrappers)
        return f"{_short(self.model_class)} in {around}" if around else _short(self.model_class)

    def __str__(self) -> str:
        begin = f"{self.verdict.upper()}: {self._title()}"
        if not self.modules:
            return f"{begin}: no position tables, so there is nothing to audit"
        verdicts = [module.verdict for module in self.modules]
        counts = {verdict: verdicts.count(verdict) for verdict in ("ok", "damaged", "unknown")}
        said = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
        lines = [*wrapped(f"{begin}: {counted(len(self.modules), 'module')} with positions: {said}"), ""]
        rows = _merged(_cells(module) for module in self.modules)
        lines += aligned([(*rest, shortened(path, _PATH)) for path, *rest in rows], _HEADER)
        if self.findings:
            lines += ["", *_described(self.findings)]
        return "\n".join(lines)


_HEADER = ("verdict", "protected", "phase error (rad)", "cos error", "at position", "module")
_PATH = 36


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _cells(module: ModuleAudit) -> tuple[str, ...]:
    measured = ("-", "-", "-")
    if (worst := module.worst) is not None:
        measured = (f"{worst.phase_error_rad:.3g}", f"{worst.cos_error:.3g}", str(worst.position))
    return (module.path, module.verdict, "yes" if module.protected else "no", *measured)


def _described(findings: list[Finding]) -> list[str]:
    """A line for each fact: what tables of one module have in common is said once, and so for layers."""
    facts = _merged((f.path, f.describe()) for f in joined(findings))
    return [line for path, said in facts for line in wrapped(f"{path}: {said}")]


def joined(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one module that say the same of several tables, as one with the largest errors."""
    facts: dict[tuple[str | None, ...], Finding] = {}
    for one in findings:
        key = (one.path, one.severity, one.source, one.layer_type)
        if (known := facts.get(key)) is None:
            facts[key] = one
            continue
        both = {
            name: choose(values)
            for name, choose in _MEASURED
            if (values := [v for f in (known, one) if (v := getattr(f, name)) is not None])
        }
        what = known.what if one.what in known.what.split(", ") else f"{known.what}, {one.what}"
        facts[key] = replace(known, what=what, **both)
    return list(facts.values())


_MEASURED: tuple[tuple[str, Any], ...] = (
    ("phase_error_rad", max),
    ("cos_error", max),
    ("relative_error", max),
    ("first_bad_position", min),
    ("first_damaged_position", min),
)


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that begin with a module's path; those that differ in the layer's number only share one."""
    counted: dict[tuple[str, ...], list[str]] = {}
    for path, *rest in rows:
        name = path or "(the model itself)"
        names = counted.setdefault((_NUMBER.sub("*", name), *rest), [])
        if name not in names:
            names.append(name)
    return [
        (names[0] if len(names) == 1 else f"{row[0]} ({len(names)} modules)", *row[1:])
        for row, names in counted.items()
    ]


def worst(found: Iterable[str]) -> Verdict:
    """Return the verdict over what was found: severities of findings, or verdicts of modules."""
    seen = set(found)
    return "damaged" if "damaged" in seen else "unknown" if "unknown" in seen else "ok"


def plain(record: Any) -> dict[str, Any]:
    """Return a dataclass as plain data for strict JSON; a number that is not finite becomes None."""
    return asdict(record, dict_factory=lambda pairs: {name: _finite(value) for name, value in pairs})


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
