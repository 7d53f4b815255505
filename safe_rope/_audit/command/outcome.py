"""What the audit of all load paths found: one entry a path and rotary module, stock beside guarded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from safe_rope._base.text import aligned

BAD_RADIANS = 0.1
_STEPS = {"initialize": "initialize", "cast": "module cast"}
_COLUMNS = 8


@dataclass(frozen=True)
class Lost:
    """One damaged tensor or result: what, where it was lost, how, and by how much."""

    what: str
    where: str
    source: str
    phase_error_rad: float | None
    cos_error: float | None
    first_bad_position: int | None
    first_damaged_position: int | None


@dataclass
class Side:
    """One rotary module at the end of one load path, stock or guarded.

    Attributes:
        verdict: "ok", "damaged" or "unknown".
        rows: for each measured position: position, phase_error_rad, cos_error, layer_type, within_tolerance.
        lost: what is damaged.
        notes: what else the audit said, in words.
        guard: what the guard did, or would do.
    """

    verdict: str
    rows: list[dict[str, Any]]
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    guard: str = ""

    @property
    def first_bad_position(self) -> int | None:
        """The first position whose phase is known to be off by more than 0.1 rad."""
        found = [entry.first_bad_position for entry in self.lost if entry.first_bad_position is not None]
        return min(found, default=None)

    def worst(self, within: int) -> dict[str, Any] | None:
        """The row with the largest error among the positions that the model announces."""
        rows = [row for row in self.rows if row["position"] < within] or self.rows
        return max(rows, key=_error, default=None)


@dataclass
class PathModule:
    """One rotary module on one load path."""

    path: str
    module: str
    module_class: str
    stock: Side
    guarded: Side


@dataclass
class Outcome:
    """The whole audit. ``text()`` and ``to_dict()`` are its forms."""

    name: str
    dtype: str
    stage: int | None
    found: dict[str, Any]
    entries: list[PathModule]

    @classmethod
    def read(cls, name: str, dtype: str, stage: int | None, found: dict[str, Any]) -> Outcome:
        """Put together what the worker measured."""
        by_path: dict[str, dict[str, dict[str, Any]]] = {}
        for result in found["paths"]:
            by_path.setdefault(result["path"], {})[result["kind"]] = result
        entries = []
        for path, kinds in by_path.items():
            stock, guarded = _sides(kinds["stock"]), _sides(kinds["guarded"])
            for module, (class_name, side) in stock.items():
                entries.append(PathModule(path, module, class_name, side, guarded[module][1]))
        return cls(name, dtype, stage, found, entries)

    def is_damaged(self, guarded: bool) -> bool:
        """Whether a table is damaged, of the stock model or of the guarded one."""
        return any((e.guarded if guarded else e.stock).verdict == "damaged" for e in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for strict JSON."""
        return {
            "model": self.name,
            "model_type": self.found["model_type"],
            "rope": self.found["description"],
            "max_position_embeddings": self.found["max_position_embeddings"],
            "dtype": self.dtype,
            "zero_stage": self.stage,
            "versions": self.found["versions"],
            "ok": not self.is_damaged(guarded=False),
            "guarded_ok": not self.is_damaged(guarded=True),
            "paths": [
                asdict(entry)
                | {kind: _with_first(asdict(getattr(entry, kind)), getattr(entry, kind)) for kind in _KINDS}
                for entry in self.entries
            ],
        }

    def text(self) -> str:
        """Return the report for people."""
        announced = self.found["max_position_embeddings"]
        zero = "no DeepSpeed" if self.stage is None else f"ZeRO-{self.stage}"
        versions = ", ".join(f"{name} {version}" for name, version in self.found["versions"].items())
        layers = self.found["layers"]
        skeleton = f"measured on a skeleton of {layers} layer{'s' if layers > 1 else ''}"
        lines = [
            f"{self.name}: {self.found['model_type']}, {self.found['description']}; {announced:,} positions",
            f"{versions}; {zero}, {self.dtype}; {skeleton}",
            "",
        ]
        if not self.entries:
            return "\n".join([*lines, "no rotary module, so there is nothing to audit"])
        lines += aligned([_summary(entry, announced) for entry in self.entries], _HEADER)
        lines += ["", *self._errors_by_position(), ""]
        lines += _explanations(self.entries)
        return "\n".join(lines)

    def _errors_by_position(self) -> list[str]:
        positions = _shown([row["position"] for row in self.entries[0].stock.rows])
        header = ("phase error (rad) at position", "", *(f"{position:,}" for position in positions))
        cells = []
        for entry in self.entries:
            for kind in _KINDS:
                errors = _worst_by_position(getattr(entry, kind).rows)
                title = f"{entry.path}: {entry.module}" if kind == "stock" else ""
                cells.append((title, kind, *(number(errors.get(position)) for position in positions)))
        return aligned(cells, header)


_KINDS = ("stock", "guarded")
_HEADER = ("load path", "module", "stock", "lost at", "phase error (rad)", "over 0.1 rad from", "guarded")


def _sides(result: dict[str, Any]) -> dict[str, tuple[str, Side]]:
    steps = [step["audit"] for step in result["steps"]]
    names = [step["step"] for step in result["steps"]]
    sides = {}
    for module in steps[-1]["modules"]:
        side = Side(module["verdict"], module["rows"], guard=module["guard"])
        for finding in _of(steps[-1], module["path"]):
            if finding["severity"] == "damaged":
                side.lost.append(_lost(finding, steps, names))
            else:
                side.notes.append(f"{finding['severity']}: {finding['what']}: {finding['source']}")
        sides[module["path"]] = (module["module_class"], side)
    return sides


def _of(audit: dict[str, Any], module: str) -> list[dict[str, Any]]:
    return [finding for finding in audit["findings"] if finding["path"] == module]


def _lost(finding: dict[str, Any], steps: list[dict[str, Any]], names: list[str]) -> Lost:
    def is_there(audit: dict[str, Any]) -> dict[str, Any] | None:
        same = (f for f in _of(audit, finding["path"]) if f["what"] == finding["what"])
        return next((f for f in same if f["severity"] == "damaged"), None)

    first = next(index for index, audit in enumerate(steps) if is_there(audit))
    origin = is_there(steps[first]) or finding
    where = origin["where"] or "unknown"
    if first > 0 and where != "cache rebuild":
        where = _STEPS.get(names[first], where)
    kept = ("phase_error_rad", "cos_error", "first_bad_position", "first_damaged_position")
    return Lost(finding["what"], where, finding["source"], **{name: finding[name] for name in kept})


def _error(row: dict[str, Any]) -> float:
    value = row["phase_error_rad"]
    return float("inf") if value is None else float(value)


def _with_first(side: dict[str, Any], original: Side) -> dict[str, Any]:
    return side | {"first_bad_position": original.first_bad_position}


def _summary(entry: PathModule, announced: int) -> tuple[str, ...]:
    stock, guarded = entry.stock.worst(announced), entry.guarded.worst(announced)
    measured = "-" if stock is None else f"{number(_error(stock))} at {stock['position']:,}"
    bad = entry.stock.first_bad_position
    where = ", ".join(dict.fromkeys(lost.where for lost in entry.stock.lost)) or "-"
    kept = "" if guarded is None else f", {number(_error(guarded))}"
    return (
        entry.path,
        entry.module or "(the model itself)",
        entry.stock.verdict,
        where,
        measured,
        "-" if bad is None else f"{bad:,}",
        f"{entry.guarded.verdict}{kept}",
    )


def _explanations(entries: list[PathModule]) -> list[str]:
    lines = []
    for entry in entries:
        said = _sentences(entry.stock.lost)
        said += [f"  {note}" for note in entry.stock.notes]
        if not said:
            continue
        lines.append(f"{entry.path}: {entry.module}")
        lines += dict.fromkeys(said)
        lines += [f"  guarded,{line[1:]}" for line in _sentences(entry.guarded.lost)]
        lines += [f"  guard: {entry.guarded.guard}"]
    return lines


def _sentences(damage: list[Lost]) -> list[str]:
    said = [f"  {lost.where}: {lost.source}" for lost in damage]
    # What forward says often only repeats what the tensor that it reads said at more length.
    said = [line for line in said if not any(other != line and other.startswith(line) for other in said)]
    return list(dict.fromkeys(said))


def _worst_by_position(rows: list[dict[str, Any]]) -> dict[int, float]:
    errors: dict[int, float] = {}
    for row in rows:
        errors[row["position"]] = max(errors.get(row["position"], 0.0), _error(row))
    return errors


def _shown(positions: list[int]) -> list[int]:
    unique = sorted(set(positions) - {0}) or [0]
    if len(unique) <= _COLUMNS:
        return unique
    step = (len(unique) - 1) / (_COLUMNS - 1)
    return [unique[round(index * step)] for index in range(_COLUMNS)]


def number(value: float | None) -> str:
    """Return two or three digits of ``value``."""
    return "-" if value is None else f"{value:.3g}" if value >= 1 else f"{value:.2g}"
