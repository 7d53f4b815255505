"""What a scan reports: findings, the byte edits that fix them, and all that one file's content says.

That depends on the content, the path and the rules only: the cache stores it and worker processes send it
back. Which findings are shown (selection, suppressions, twins, baseline) is decided later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
# Longer spans are cut: the lines are for people and for the baseline's key.
MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces the bytes ``start:end`` of the source as it was read."""

    start: int
    end: int
    replacement: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that belong together. Safe: same FP32 table bit for bit, and the right one under zero.Init."""

    safe: bool
    description: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One hazard. Lines and columns count from 1, columns in characters; the end is exclusive."""

    rule: str
    severity: Severity
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    fix: Fix | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Why a file, or a part of one, was not scanned. Line and column are 0 where there is none."""

    path: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}:{self.column}" if self.line else self.path
        return f"{place}: {self.message}"


@dataclass(frozen=True, slots=True)
class Hit:
    """A finding, the source lines that it spans, and the suppressions (by index) that silence it."""

    finding: Finding
    lines: tuple[str, ...]
    silenced_by: tuple[int, ...] = ()

    @property
    def snippet(self) -> str:
        """The code of the finding's span, on one line with single spaces."""
        finding = self.finding
        lines = list(self.lines)
        if not lines:
            return ""
        if len(lines) == finding.end_line - finding.line + 1:
            lines[-1] = lines[-1][: finding.end_column - 1]
        lines[0] = lines[0][finding.column - 1 :]
        return " ".join(" ".join(lines).split())


@dataclass(frozen=True, slots=True)
class Suppression:
    """A comment that silences rules on the lines of its statement; every rule when `rules` is None."""

    first_line: int
    last_line: int
    line: int
    column: int
    rules: tuple[str, ...] | None

    def covers(self, finding: Finding) -> bool:
        """Return whether the finding starts in the statement and is of a rule that the comment names."""
        if not self.first_line <= finding.line <= self.last_line:
            return False
        return self.rules is None or finding.rule in self.rules


@dataclass(frozen=True, slots=True)
class FileResult:
    """Everything that one file's content says."""

    path: str
    hits: tuple[Hit, ...] = ()
    suppressions: tuple[Suppression, ...] = ()
    generated_from: str | None = None
    errors: tuple[Diagnostic, ...] = ()


def encode(result: FileResult) -> str | None:
    """Return the result as JSON; None for a file with nothing to say."""
    return None if result == FileResult(result.path) else json.dumps(astuple(result))


def decode(path: str, data: str | None) -> FileResult:
    """Return the result that `encode` made the text from.

    Raises:
        ValueError, TypeError, LookupError: the text is not what `encode` returns.
    """
    if data is None:
        return FileResult(path)
    path, hits, suppressions, generated_from, errors = json.loads(data)
    return FileResult(
        path,
        tuple(_hit(*hit) for hit in hits),
        tuple(_suppression(*suppression) for suppression in suppressions),
        generated_from,
        tuple(Diagnostic(*error) for error in errors),
    )


def _suppression(first: int, last: int, line: int, column: int, rules: list[str] | None) -> Suppression:
    return Suppression(first, last, line, column, None if rules is None else tuple(rules))


def _hit(finding: list[Any], lines: list[str], silenced_by: list[int]) -> Hit:
    if finding[-1] is not None:
        safe, description, edits = finding[-1]
        finding[-1] = Fix(safe, description, tuple(Edit(*edit) for edit in edits))
    return Hit(Finding(*finding), tuple(lines), tuple(silenced_by))


def apply_edits(source: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the source with every edit made; equal edits count once.

    Raises:
        ValueError: two different edits overlap.
    """
    pieces: list[bytes] = []
    position = 0
    for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < position:
            raise ValueError(f"edits overlap at byte {edit.start}; apply them in separate runs")
        pieces += [source[position : edit.start], edit.replacement.encode()]
        position = edit.end
    return b"".join([*pieces, source[position:]])
