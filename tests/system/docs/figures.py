"""The measured figures of a page: those of its prose, and its tables that hold numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_UNIT = (
    r"(?:%|ms\b|s\b|min\b|minutes\b|seconds\b|microseconds\b|MB\b|GB\b|GiB\b|bytes\b|times\b|rad\b|radians\b|"
    r"ulp\b|operators\b|files\b|findings\b)"
)
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
# A number of a release is no figure: 0.18, 2.7, 3.10, 4.57, 5.x, 5.23.0.
_RELEASE = r"(?:0\.1[4-9]|2\.\d|3\.1\d|4\.\d\d|5\.[\dx]+)(?:\.\d+)*\b(?! ?(?:" + _UNIT[3:] + ")"
MEASURED = re.compile(
    rf"(?<![\w.^-]){_NUMBER}(?: (?:to|and|of|against) {_NUMBER})? ?{_UNIT}"
    rf"|(?<![\w.^-]){_NUMBER} (?:of|against) {_NUMBER}"
    rf"|(?<![\w.^/-])(?!{_RELEASE})\d+\.\d+(?:e-?\d+)?(?![\d.]*\.\d)(?!\w)"
    r"|(?<![\w.^-])\d+e-\d+"
)
MADE = ("<!-- safe-rope patches", "<!-- tools/lab matrix")
"""Tables that another test compares with the record that they are made from."""

Table = list[list[str]]


def sections(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the headings of a page with the lines below each, without code."""
    title, held, fenced = "", list[str](), False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and re.match(r"#+ ", line):
            yield title, held
            title, held = line.lstrip("# "), []
        elif not fenced:
            held.append(line)
    yield title, held


def figures_of(lines: list[str]) -> list[str]:
    """Return the measured figures of the prose, each once, in order."""
    text = " ".join(line for line in lines if not line.lstrip().startswith(("|", "<")))
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", re.sub(r"\s+", " ", text))
    return list(dict.fromkeys(match.group().strip() for match in MEASURED.finditer(text)))


def tables_of(lines: list[str]) -> list[Table]:
    """Return the tables that have a number in a cell behind the first column."""
    found, rows, made = list[Table](), Table(), False
    for line in [*lines, ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            cells = [cell for row in rows[2:] for cell in row[1:]]
            if not made and any(re.match(r"[*<]*\d|.*\d,\d{3}", cell) for cell in cells):
                found.append([rows[0], *rows[2:]])
            rows = []
        if line.startswith(MADE):
            made = not made
    return found
