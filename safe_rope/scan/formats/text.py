"""Text for people: each finding with its lines, the span underlined, and the fix."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence

from safe_rope.scan.engine import Diagnostic, Hit
from safe_rope.scan.formats.plain import cells, printable

# Of ANSI terminals.
_BOLD, _DIM, _GREEN = "1", "2", "32"
_COLOURS = {"error": "1;31", "warning": "1;33", "note": "1;36"}
_SHOWN_LINES = 4
# Piped output has no width; this only cuts lines that no person wrote.
_PIPED_WIDTH = 400

Style = Callable[[str, str], str]


def render(hits: Sequence[Hit], *, colored: bool, width: int | None = None) -> str:
    """Return the findings as text.

    Args:
        hits: in the order to show them.
        colored: with the terminal's colours.
        width: of the terminal; longer source lines are cut around the span. Nothing is ever wrapped.
    """
    style: Style = (lambda text, code: f"\x1b[{code}m{text}\x1b[0m") if colored else (lambda text, code: text)
    return "".join(_finding(hit, width or _PIPED_WIDTH, style) for hit in hits)


def for_stdout(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return the findings as text in the colours and the width that stdout takes; errors go to stderr."""
    if not sys.stdout.isatty():
        return render(hits, colored=bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR"))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return render(hits, colored=not plain, width=max(40, shutil.get_terminal_size().columns))


def concise(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return one line for each finding."""
    lines = []
    for one in (hit.finding for hit in hits):
        fixable = "[*] " if one.fix is not None and one.fix.safe else ""
        place = f"{printable(one.path)}:{one.line}:{one.column}"
        lines.append(f"{place}: {one.rule} {fixable}{printable(one.message)}\n")
    return "".join(lines)


def _finding(hit: Hit, width: int, style: Style) -> str:
    finding = hit.finding
    colour = _COLOURS[finding.severity]
    place = style(f"{printable(finding.path)}:{finding.line}:{finding.column}: ", _BOLD)
    what = style(f"{finding.rule} {finding.severity}", colour)
    text = f"{place}{what}: {printable(finding.message)}\n"
    gutter = len(str(finding.line + len(hit.lines) - 1))
    empty = style(f" {'':{gutter}} | ", _DIM)
    for number, line in enumerate(hit.lines[:_SHOWN_LINES], start=finding.line):
        start = finding.column - 1 if number == finding.line else len(line) - len(line.lstrip())
        end = finding.end_column - 1 if number == finding.end_line else len(line.rstrip())
        before, span, after = _cut(line, start, max(end, start + 1), width - gutter - 4)
        text += style(f" {number:{gutter}} | ", _DIM) + f"{before}{span}{after}".rstrip() + "\n"
        marks = " " * cells(before) + "^" * max(1, cells(span))
        text += empty + style(marks, colour) + "\n"
    if len(hit.lines) > _SHOWN_LINES:
        text += style(f" {'':{gutter}} | …\n", _DIM)
    if finding.fix is not None:
        kind = "fix" if finding.fix.safe else "unsafe fix"
        text += style(f" {'':{gutter}} = ", _DIM)
        text += style(f"{kind}: {printable(finding.fix.description)}\n", _GREEN)
    return text + "\n"


def _cut(line: str, start: int, end: int, width: int) -> tuple[str, str, str]:
    """Return the line in three parts (what precedes, span, what follows), at most `width` wide; the span's
    start is always seen."""
    before, span, after = (
        printable(part.replace("\t", "    ")) for part in (line[:start], line[start:end], line[end:])
    )
    if cells(before + span + after) <= width:
        return before, span, after
    span = _head(span, width - 4)
    room = width - cells(span)
    if cells(before) > room:
        before = _head(before[::-1], room - 1)[::-1]
    return before, span, _head(after, width - cells(before + span))


def _head(text: str, width: int) -> str:
    """Return what fits of a text, with an ellipsis where something is left out."""
    if cells(text) <= width:
        return text
    while text and cells(text) >= width:
        text = text[: width - 1] if len(text) >= width > 0 else text[:-1]
    return f"{text}…" if width > 0 else ""
