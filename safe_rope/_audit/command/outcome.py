"""What the audit of all load paths found: one entry a path and rotary module, stock beside guarded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from safe_rope._audit.command.job import Job
from safe_rope._audit.report import AuditReport, Finding, MeasuredRow, ModuleAudit, Verdict, plain, worst
from safe_rope._base.text import aligned

KINDS = ("stock", "guarded")
_COLUMNS = 8
_HEADER = ("load path", "module", "stock", "lost at", "phase error (rad)", "over 0.1 rad from", "guarded")
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
        rows = [row for row in self.module.rows if row.position < within] or self.module.rows
        return max(rows, key=lambda row: row.phase_error_rad, default=None)

    def errors(self) -> dict[int, float]:
        """The largest phase error by position, radians."""
        errors: dict[int, float] = {}
        for row in self.module.rows:
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

    @property
    def title(self) -> str:
        """The load path and the module."""
        return f"{self.path}: {self.stock.module.path}"


@dataclass
class Outcome:
    """The whole audit. ``text()`` and ``to_dict()`` are its forms.

    Attributes:
        job: what was asked.
        model_type: of the model.
        rope: its rotary embeddings in words.
        announced: how many positions its config announces.
        layers: how many layers were measured.
        versions: of the libraries that were measured with.
        audits: for each load path, the audits of the "stock" and of the "guarded" model.
    """

    job: Job
    model_type: str
    rope: str
    announced: int
    layers: int
    versions: dict[str, str]
    audits: dict[str, dict[str, AuditReport]]

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
        return worst((entry.guarded if guarded else entry.stock).module.verdict for entry in judged)

    def summary(self) -> str:
        """The verdict in one sentence."""
        paths = [path for path in self.audits if self.job.judges(path)]
        verdict = self.verdict(guarded=False)
        bad = dict.fromkeys(entry.path for entry in self.entries if entry.stock.module.verdict == verdict)
        named = [path for path in bad if path in paths]
        on = {
            "damaged": f"AFFECTED on {len(named)} of {len(paths)} ways to load this model",
            "unknown": f"UNKNOWN on {len(named)} of {len(paths)} ways to load this model",
            "ok": f"NOT AFFECTED on any of {len(paths)} ways to load this model",
        }[verdict]
        which = "" if verdict == "ok" else f" ({'; '.join(named)})"
        return f"{on}{which}. With the guard: {self.verdict(guarded=True)}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for strict JSON."""
        return {
            "model": self.job.name,
            "model_type": self.model_type,
            "rope": self.rope,
            "max_position_embeddings": self.announced,
            "dtype": self.job.dtype,
            "zero_stage": self.job.stage,
            "versions": self.versions,
            "ok": self.verdict(guarded=False) == "ok",
            "guarded_ok": self.verdict(guarded=True) == "ok",
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
        lines = [
            self.summary(),
            "",
            f"{self.job.name}: {self.model_type}, {self.rope}; {self.announced:,} positions",
            f"{self.environment}; {zero}, {self.job.dtype}; {skeleton}",
            "",
        ]
        if not self.entries:
            return "\n".join([*lines[2:], "no rotary module, so there is nothing to audit"])
        lines += aligned([_summary(entry, self.announced) for entry in self.entries], _HEADER)
        lines += ["", *self._errors_by_position(), ""]
        return "\n".join([*lines, *(line for entry in self.entries for line in _explanation(entry))])

    def _errors_by_position(self) -> list[str]:
        positions = _shown(self.entries[0].stock.errors())
        cells = []
        for entry in self.entries:
            for title, kind, side in ((entry.title, "stock", entry.stock), ("", "guarded", entry.guarded)):
                errors = side.errors()
                cells.append((title, kind, *(number(errors.get(position)) for position in positions)))
        return aligned(cells, ("phase error (rad) at position", "", *map(grouped, positions)))


def _sides(report: AuditReport) -> dict[str, Side]:
    return {m.path: Side(m, [f for f in report.findings if f.path == m.path]) for m in report.modules}


def _summary(entry: Entry, announced: int) -> tuple[str, ...]:
    stock, guarded = entry.stock.worst(announced), entry.guarded.worst(announced)
    return (
        entry.path,
        entry.stock.module.path or "(the model itself)",
        entry.stock.module.verdict,
        ", ".join(dict.fromkeys(str(lost.where) for lost in entry.stock.lost)) or "-",
        "-" if stock is None else f"{number(stock.phase_error_rad)} at {stock.position:,}",
        grouped(entry.stock.first_bad_position),
        entry.guarded.module.verdict + ("" if guarded is None else f", {number(guarded.phase_error_rad)}"),
    )


def _explanation(entry: Entry) -> list[str]:
    said = _sentences(entry.stock.lost) + [f"  {note}" for note in entry.stock.notes]
    if not said:
        return []
    guarded = [f"  guarded,{line[1:]}" for line in _sentences(entry.guarded.lost)]
    return [entry.title, *dict.fromkeys(said), *guarded, f"  guard: {entry.guarded.module.guard}"]


def _sentences(damage: list[Finding]) -> list[str]:
    said = [f"  {lost.where}: {lost.source}" for lost in damage]
    # What forward says often only repeats what the tensor that it reads said at more length.
    said = [line for line in said if not any(other != line and other.startswith(line) for other in said)]
    return list(dict.fromkeys(said))


def _shown(measured: Iterable[int]) -> list[int]:
    positions = sorted(set(measured) - {0}) or [0]
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
