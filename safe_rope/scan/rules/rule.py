"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safe_rope.scan.engine import Call, File, Report, Severity, Site

Check = Callable[[File, Site, Call | None], Report | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as its file describes it.

    ``functions`` are the last parts of the names of the functions and methods whose calls it looks at;
    "@" stands for the operator. ``VALID`` and ``INVALID`` are sources that are its tests.
    """

    id: str
    name: str
    severity: Severity
    summary: str
    explanation: str
    functions: tuple[str, ...]
    check: Check
    VALID: tuple[str, ...]
    INVALID: tuple[str, ...]
    once_per_class: bool = False
