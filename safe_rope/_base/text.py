"""Text for people: names, counts, aligned tables, lines that fit a terminal, the nearest known name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

WIDTH = 98
"""Columns that a report prints in."""
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


def class_name(cls: type) -> str:
    """Return the class's name with its Python module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def aligned(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> list[str]:
    """Return the lines of a table."""
    rows = [header, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def wrapped(line: str, indent: str = "    ") -> list[str]:
    """Return ``line`` as lines that fit; those after the first are indented."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def shortened(text: str, width: int) -> str:
    """Return ``text`` without its middle where it is longer than ``width``."""
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - half - 1]}…{text[-half:]}"


class Report:
    """What is printed as text has a short form for a debugger, and one for notebooks."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {shortened(str(self).splitlines()[0], 76)}>"

    def _repr_html_(self) -> str:
        import html  # its table of entities is what no terminal needs

        return f"<pre>{html.escape(str(self))}</pre>"
