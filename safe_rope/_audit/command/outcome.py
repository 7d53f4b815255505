"""What the audit of all load paths found: one entry a path and rotary module, stock beside guarded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from safe_rope._audit.command.job import Job
from safe_rope._audit.report import (
    AuditReport,
    Finding,
    MeasuredRow,
    ModuleAudit,
    Verdict,
    joined,
    plain,
    worst,
)
from safe_rope._base.text import Report, aligned, wrapped

SCHEMA = "safe_rope.audit-paths/2"
KINDS = ("stock", "guarded")
_COLUMNS = 5
_HEADER = ("load path", "stock", "lost at", "rad off", "> 0.1 from", "guarded")
_TOLD = (
    "what",
    "where",
    "source",
    "phase_error_rad",
    "cos_error",
    "first_bad_position",
    "first_damaged_position",
)


class Side(NamedTuple):
    """One rotary module at the end of one load path, stock or guarded, and what was found about it."""

    module: ModuleAudit
    findings: list[Finding]

    @property
    def lost(self) -> list[Finding]:
        """What is damaged."""
        return [finding for finding in self.findings if finding.severity == "damaged"]

    @property
    def notes(self) -> list[str]:
        """What else the audit said, in words."""
        others = [finding for finding in self.findings if finding.severity != "damaged"]
        return [f"{finding.severity}: {finding.what}: {finding.source}" for finding in others]

    @property
    def first_bad_position(self) -> int | None:
        """The first position whose phase is known to be off by more than 0.1 rad."""
        found = [lost.first_bad_position for lost in self.lost if lost.first_bad_position is not None]
        return min(found, default=None)

    def worst(self, within: int) -> MeasuredRow | None:
        """The row with the largest error among the positions that the model announces."""
        rows = [row for row in self.module.rows if row.position < within and row.matters] or self.module.rows
        return max(rows, key=lambda row: row.phase_error_rad, default=None)

    def errors(self) -> dict[int, float]:
        """The largest phase error by position, radians."""
        errors: dict[int, float] = {}
        for row in (row for row in self.module.rows if row.matters):
            errors[row.position] = max(errors.get(row.position, 0.0), row.phase_error_rad)
        return errors

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for strict JSON."""
        return {
            "verdict": self.module.verdict,
            "rows": plain(self.module)["rows"],
            "lost": [{name: plain(finding)[name] for name in _TOLD} for finding in self.lost],
            "notes": self.notes,
            "guard": self.module.guard,
            "first_bad_position": self.first_bad_position,
        }


class Entry(NamedTuple):
    """One rotary module on one load path."""

    path: str
    stock: Side
    guarded: Side


@dataclass(repr=False)
class Outcome(Report):
    """The whole audit. ``text()`` and ``to_dict()`` are its forms.

    Attributes:
        job: what was asked.
        model_type: of the model.
        rope: its rotary embeddings in words.
        announced: how many positions its config announces.
        layers: how many layers were measured.
        versions: of the libraries that were measured with.
        audits: for each load path, the audits of the "stock" and of the "guarded" model.
        failed: for each load path on which the stock model cannot be loaded at all, why.
        left_out: what of the model was not measured, in words.
    """

    job: Job
    model_type: str
    rope: str
    announced: int
    layers: int
    versions: dict[str, str]
    audits: dict[str, dict[str, AuditReport]]
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @cached_property
    def entries(self) -> list[Entry]:
        """One entry a path and rotary module."""
        entries = []
        for path, kinds in self.audits.items():
            stock, guarded = (_sides(kinds[kind]) for kind in KINDS)
            entries += [Entry(path, side, guarded[module]) for module, side in stock.items()]
        return entries

    def verdict(self, guarded: bool) -> Verdict:
        """The worst verdict on the judged paths, over the stock or the guarded tables."""
        judged = [entry for entry in self.entries if self.job.judges(entry.path)]
        found: list[str] = [(entry.guarded if guarded else entry.stock).module.verdict for entry in judged]
        return worst([*found, *("unknown" for path in self.failed if self.job.judges(path))])

    def summary(self) -> str:
        """The verdict in one sentence."""
        paths = [path for path in (*self.audits, *self.failed) if self.job.judges(path)]
        verdict = self.verdict(guarded=False)
        bad = dict.fromkeys(entry.path for entry in self.entries if entry.stock.module.verdict == verdict)
        named = [path for path in (*bad, *(self.failed if verdict == "unknown" else ())) if path in paths]
        on = {
            "damaged": f"AFFECTED on {len(named)} of {len(paths)} ways to load this model",
            "unknown": f"UNKNOWN on {len(named)} of {len(paths)} ways to load this model",
            "ok": f"NOT AFFECTED on any of {len(paths)} ways to load this model",
        }[verdict]
        if verdict == "unknown" and not bad.keys() & set(paths):
            others = "" if len(named) == len(paths) else "; NOT AFFECTED on the others"
            on = f"CANNOT BE LOADED by what is installed on {len(named)} of {len(paths)} ways{others}"
        which = "" if verdict == "ok" else f" ({'; '.join(named)})"
        trainer = next((path for path in self.audits if path.endswith("from_pretrained, initialize")), None)
        used = "" if trainer is None else f" HF Trainer with this config: {self._verdict_on(trainer)}."
        return f"{on}{which}.{used} With the guard: {self.verdict(guarded=True)}."

    def _verdict_on(self, path: str) -> Verdict:
        return worst(entry.stock.module.verdict for entry in self.entries if entry.path == path)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for strict JSON."""
        return {
            "schema": SCHEMA,
            "model": self.job.name,
            "model_type": self.model_type,
            "rope": self.rope,
            "max_position_embeddings": self.announced,
            "dtype": self.job.dtype,
            "zero_stage": self.job.stage,
            "versions": self.versions,
            "ok": self.verdict(guarded=False) == "ok",
            "guarded_ok": self.verdict(guarded=True) == "ok",
            "failed": self.failed,
            "left_out": self.left_out,
            "paths": [
                {
                    "path": entry.path,
                    "module": entry.stock.module.path,
                    "module_class": entry.stock.module.module_class,
                    "stock": entry.stock.to_dict(),
                    "guarded": entry.guarded.to_dict(),
                }
                for entry in self.entries
            ],
        }

    @property
    def environment(self) -> str:
        """The versions in words."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def text(self) -> str:
        """Return the report for people."""
        zero = "no DeepSpeed" if self.job.stage is None else f"ZeRO-{self.job.stage}"
        skeleton = f"measured on a skeleton of {self.layers} layer{'s' if self.layers > 1 else ''}"
        about = [
            f"{self.job.name}: {self.model_type}, {self.rope}; {self.announced:,} positions",
            f"{self.environment}; {zero}, {self.job.dtype}; {skeleton}",
        ]
        lines = [*wrapped(self.summary(), ""), "", *(part for line in about for part in wrapped(line))]
        for said in self.left_out:
            lines += wrapped(f"not measured: {said}; audit the model live, with safe_rope.audit(model)")
        for said in self.failed.values():
            lines += ["", *wrapped(f"not measured, as the model cannot be loaded so: {said}")]
        if not self.entries:
            lines += ["", "no position tables, so there is nothing to audit"]
        for module in dict.fromkeys(entry.stock.module.path for entry in self.entries):
            entries = [entry for entry in self.entries if entry.stock.module.path == module]
            lines += ["", *wrapped(module or "(the model itself)"), ""]
            lines += aligned([_summary(entry, self.announced) for entry in entries], _HEADER)
            lines += ["", *_errors_by_position(entries), ""]
            lines += [part for line in _explanations(entries) for part in wrapped(line)]
        return "\n".join(lines).rstrip()

    __str__ = text


def _errors_by_position(entries: list[Entry]) -> list[str]:
    positions = _shown(entries[0].stock.errors())
    cells = []
    for entry in entries if positions else ():
        for title, kind, side in ((entry.path, "stock", entry.stock), ("", "guarded", entry.guarded)):
            errors = side.errors()
            cells.append((title, kind, *(number(errors.get(position)) for position in positions)))
    return aligned(cells, ("phase error (rad) at position", "", *map(grouped, positions))) if cells else []


def _sides(report: AuditReport) -> dict[str, Side]:
    return {m.path: Side(m, [f for f in report.findings if f.path == m.path]) for m in report.modules}


def _summary(entry: Entry, announced: int) -> tuple[str, ...]:
    stock = entry.stock.worst(announced)
    where = list(dict.fromkeys(str(lost.where) for lost in entry.stock.lost))
    more = f" +{len(where) - 1}" if len(where) > 1 else ""
    return (
        entry.path,
        entry.stock.module.verdict,
        f"{where[0]}{more}" if where else "-",
        "-" if stock is None else f"{number(stock.phase_error_rad)} at {stock.position:,}",
        grouped(entry.stock.first_bad_position),
        entry.guarded.module.verdict,
    )


def _explanations(entries: list[Entry]) -> Iterator[str]:
    """What was lost on each path, and once what all paths have in common."""
    common = []
    for entry in entries:
        for fact in joined(entry.stock.findings):
            said = f"{fact.what}: {fact.source}"
            if fact.severity == "note":
                common.append(f"note: {said}")
            else:
                yield f"{entry.path}: {fact.where or fact.severity}: {said}"
        yield from (f"{entry.path}, guarded: {f.describe()}" for f in joined(entry.guarded.findings))
        common.append(f"guard: {entry.guarded.module.guard}")
    yield from dict.fromkeys(common)


def _shown(measured: Iterable[int]) -> list[int]:
    positions = sorted(set(measured) - {0})
    if len(positions) <= _COLUMNS:
        return positions
    step = (len(positions) - 1) / (_COLUMNS - 1)
    return [positions[round(index * step)] for index in range(_COLUMNS)]


def number(value: float | None) -> str:
    """Return two or three digits of ``value``."""
    return "-" if value is None else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def grouped(position: int | None) -> str:
    """Return ``position`` with a comma after each group of three digits."""
    return "-" if position is None else f"{position:,}"
