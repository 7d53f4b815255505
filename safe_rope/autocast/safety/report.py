"""Which parameters may travel between ranks in the low dtype, and why the others may not."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from safe_rope._base.text import Report, aligned, shortened, wrapped

SCHEMA = "safe_rope.autocast-safety/1"
_NAME = 44
"""Columns of a parameter's name."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class ParameterSafety:
    """One parameter, under one of its names.

    Attributes:
        name: as in ``model.named_parameters(remove_duplicate=False)``.
        safe: whether every use of it goes through a cast to the low dtype.
        reason: why, in words: what reads it in its own dtype, or what else keeps it from being safe.
        numel: its elements, of the whole parameter where it is partitioned.
        bytes: what these take in the parameter's own dtype.
        read_by: the operator that reads it uncast (``aten.embedding``), and in which module, if one does.
        tied_to: the other names of the same storage.
    """

    name: str
    safe: bool
    reason: str
    numel: int
    bytes: int
    read_by: str | None = None
    tied_to: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class SafetyReport(Report):
    """What one traced step says about every parameter of a model. ``str()`` is a table of 98 columns.

    Attributes:
        parameters: one entry a name, in the model's order; tied parameters have one under each name.
        warnings: what the table does not say.
        dtype: the low dtype, as text: "bfloat16".
    """

    parameters: tuple[ParameterSafety, ...]
    warnings: tuple[str, ...] = ()
    dtype: str = "bfloat16"

    @property
    def safe(self) -> frozenset[str]:
        """The names of the safe parameters."""
        return frozenset(entry.name for entry in self.parameters if entry.safe)

    @property
    def safe_share(self) -> float:
        """The share of elements that are safe; what is tied counts once."""
        counted = self._distinct()
        total = sum(entry.numel for entry in counted)
        return sum(entry.numel for entry in counted if entry.safe) / total if total else 0.0

    def without(self, reasons: Mapping[str, str], warning: str) -> SafetyReport:
        """Return the report with the parameters named in ``reasons`` unsafe, and one more warning."""

        def unsafe(entry: ParameterSafety) -> ParameterSafety:
            if not entry.safe or entry.name not in reasons:
                return entry
            return replace(entry, safe=False, reason=reasons[entry.name])

        parameters = tuple(map(unsafe, self.parameters))
        return replace(self, parameters=parameters, warnings=(*self.warnings, warning))

    def _distinct(self) -> list[ParameterSafety]:
        seen: set[str] = set()
        distinct = []
        for entry in self.parameters:
            if entry.name not in seen:
                distinct.append(entry)
                seen.update((entry.name, *entry.tied_to))
        return distinct

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            "schema": SCHEMA,
            "dtype": self.dtype,
            "safe_share": self.safe_share,
            "parameters": [asdict(entry) | {"tied_to": list(entry.tied_to)} for entry in self.parameters],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        counted = self._distinct()
        safe = [entry for entry in counted if entry.safe]
        head = (
            f"{len(safe)} of {len(counted)} parameters, {self.safe_share:.1%} of the elements, "
            f"may travel in {self.dtype}"
        )
        warnings = [line for text in self.warnings for line in wrapped(f"warning: {text}")]
        return "\n".join([head, *_lines(counted), *warnings])


def _lines(entries: list[ParameterSafety]) -> list[str]:
    """Align the entries; those that differ in nothing but numbers in their names share one row."""
    grouped: dict[tuple[str, bool, str], list[ParameterSafety]] = {}
    for entry in entries:
        key = (_NUMBER.sub("*", entry.name), entry.safe, _NUMBER.sub("*", entry.reason))
        grouped.setdefault(key, []).append(entry)
    rows = []
    for (name, safe, reason), members in grouped.items():
        if len(members) == 1:
            name, reason = members[0].name, members[0].reason
        else:
            name = f"{name} ({len(members)})"
        bytes_ = f"{sum(entry.bytes for entry in members):,}"
        rows.append((shortened(name, _NAME), "yes" if safe else "no", bytes_, reason))
    header, *lines = table(("parameter", "safe", "bytes", "why"), rows, numbers={"bytes"})
    indent = " " * header.index("why")
    return [header, *(part for line in lines for part in wrapped(line, indent))]


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: Collection[str]) -> list[str]:
    """Return the lines of a table, the columns named in ``numbers`` aligned at the right."""
    columns = [
        [cell.rjust(max(map(len, column))) for cell in column] if column[0] in numbers else column
        for column in zip(header, *rows, strict=True)
    ]
    first, *others = zip(*columns, strict=True)
    return aligned(others, first)
