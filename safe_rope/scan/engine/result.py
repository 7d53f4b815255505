"""What the scan of one file yields, before selection: it depends on the file's content and on the rules only.

That makes it what the cache stores and what worker processes send back. Which findings are shown (selection,
suppressions, twins, baseline) is decided later, in the main process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safe_rope.scan.engine.finding import Edit, Finding, Fix

# Longer spans are cut: the lines are for people and for the baseline's key.
MAX_LINES = 20


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


def encode(result: FileResult) -> list[Any] | None:
    """Return the result as plain JSON data without its path; None for a file with nothing to say."""
    if not (result.hits or result.suppressions or result.generated_from or result.errors):
        return None
    return [
        [_encode_hit(hit) for hit in result.hits],
        [[s.first_line, s.last_line, s.line, s.column, s.rules] for s in result.suppressions],
        result.generated_from,
        [[error.line, error.column, error.message] for error in result.errors],
    ]


def _encode_hit(hit: Hit) -> list[Any]:
    f = hit.finding
    fix = None
    if f.fix is not None:
        edits = [[edit.start, edit.end, edit.replacement] for edit in f.fix.edits]
        fix = [edits, f.fix.safe, f.fix.description]
    return [
        f.rule,
        f.severity,
        f.line,
        f.column,
        f.end_line,
        f.end_column,
        f.message,
        fix,
        hit.lines,
        hit.silenced_by,
    ]


def decode(path: str, data: list[Any] | None) -> FileResult:
    """Return the result that `encode` made the data from.

    Raises:
        ValueError, TypeError, LookupError: the data is not what `encode` returns.
    """
    if data is None:
        return FileResult(path)
    hits, suppressions, generated_from, errors = data
    return FileResult(
        path,
        tuple(_decode_hit(path, *hit) for hit in hits),
        tuple(
            Suppression(s[0], s[1], s[2], s[3], None if s[4] is None else tuple(s[4])) for s in suppressions
        ),
        generated_from,
        tuple(Diagnostic(path, *error) for error in errors),
    )


def _decode_hit(
    path: str,
    rule: str,
    severity: Any,
    line: int,
    column: int,
    end_line: int,
    end_column: int,
    message: str,
    fix: list[Any] | None,
    lines: list[str],
    silenced_by: list[int],
) -> Hit:
    made = None if fix is None else Fix(tuple(Edit(*edit) for edit in fix[0]), fix[1], fix[2])
    finding = Finding(rule, severity, path, line, column, end_line, end_column, message, made)
    return Hit(finding, tuple(lines), tuple(silenced_by))
