"""Analyzes the source of one file: prefilter, one parse, one walk for all rules."""

from __future__ import annotations

from collections.abc import Iterable

from safe_rope.scan.finding import Finding


class SourceError(Exception):
    """The source cannot be analyzed: a syntax error, an unknown encoding, nesting too deep."""

    def __init__(self, path: str, line: int, column: int, message: str) -> None:
        super().__init__(f"{path}:{line}:{column}: {message}")
        self.path = path
        self.line = line
        self.column = column
        self.message = message


def analyze(source: bytes, path: str, rules: Iterable[str] | None = None) -> list[Finding]:
    """Return the findings of one file, ordered by position; nothing in it is imported or executed.

    Args:
        source: the file as read; edits of fixes count its bytes.
        path: put into findings; conversion scripts are also recognized by it.
        rules: ids of the rules to report, all when None.
    Raises:
        SourceError: the source does not decode or parse.
    """
    return []


def generated_from(source: bytes) -> str | None:
    """Return the name of the modular file that this file says it is generated from."""
    return None
