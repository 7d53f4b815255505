"""Text for people: tables with aligned columns, and the nearest known name to a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

_RULE = re.compile(r"([A-Z]+)0*([0-9]+)")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; SR1 and SR0001 mean SR001."""
    known = list(known)
    wanted = _RULE.fullmatch(name)
    best: str | None = None
    best_ratio = 0.5
    for candidate in known:
        rule = _RULE.fullmatch(candidate)
        if wanted and rule and wanted.groups() == rule.groups():
            return candidate
        ratio = SequenceMatcher(None, name, candidate).ratio()
        if ratio > best_ratio:
            best, best_ratio = candidate, ratio
    return best


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, "1 module" or "2 modules"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def aligned(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> list[str]:
    """Return the lines of a table."""
    rows = [header, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
