"""Text for people: each finding with its lines, the span underlined, and the fix."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from safe_rope.scan.engine import Diagnostic, Hit
from safe_rope.scan.formats.plain import cells, printable

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_SHOWN_LINES = 4
# Piped output has no width; this only cuts lines that no person wrote.
_PIPED_WIDTH = 400

Styled = list[tuple[str, str]]


def render(hits: Sequence[Hit], *, colored: bool, width: int | None = None) -> str:
    """Return the findings as text.

    Args:
        hits: in the order to show them.
        colored: with the terminal's colours.
        width: of the terminal; longer source lines are cut around the span. Nothing is ever wrapped.
    """
    parts: Styled = []
    for hit in hits:
        parts += _finding(hit, width or _PIPED_WIDTH)
    if not colored:
        return "".join(text for text, _ in parts)
    # rich takes longer to import than a warm scan of a thousand files.
    from rich.console import Console
    from rich.text import Text

    console = Console(force_terminal=True, width=1 << 16, soft_wrap=True, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(Text.assemble(*parts), end="")
    return captured.get()


def for_stdout(hits: Sequence[Hit], errors: Sequence[Diagnostic] = ()) -> str:
    """Return the findings as text in the colours and the width that stdout takes; errors go to stderr."""
    if not sys.stdout.isatty():
        return render(hits, colored=bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR"))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return render(hits, colored=not plain, width=max(40, shutil.get_terminal_size().columns))


def _finding(hit: Hit, width: int) -> Styled:
    finding = hit.finding
    style = _STYLES[finding.severity]
    parts: Styled = [
        (f"{printable(finding.path)}:{finding.line}:{finding.column}: ", "bold"),
        (f"{finding.rule} {finding.severity}", style),
        (f": {printable(finding.message)}\n", ""),
    ]
    gutter = len(str(finding.line + len(hit.lines) - 1))
    for index, line in enumerate(hit.lines[:_SHOWN_LINES]):
        number = finding.line + index
        start = finding.column - 1 if index == 0 else len(line) - len(line.lstrip())
        end = finding.end_column - 1 if number == finding.end_line else len(line.rstrip())
        before, span, after = _cut(line, start, max(end, start + 1), width - gutter - 4)
        parts += [
            (f" {number:{gutter}} | ", "dim"),
            (f"{before}{span}{after}".rstrip() + "\n", ""),
            (f" {'':{gutter}} | ", "dim"),
            (" " * cells(before) + "^" * max(1, cells(span)) + "\n", style),
        ]
    if len(hit.lines) > _SHOWN_LINES:
        parts.append((f" {'':{gutter}} | …\n", "dim"))
    if finding.fix is not None:
        kind = "fix" if finding.fix.safe else "unsafe fix"
        parts += [(f" {'':{gutter}} = ", "dim"), (f"{kind}: {printable(finding.fix.description)}\n", "green")]
    parts.append(("\n", ""))
    return parts


def _cut(line: str, start: int, end: int, width: int) -> tuple[str, str, str]:
    """Return the line as before, span and after, no wider than `width`; the span's start is always seen."""
    before, span, after = (_spaces(part) for part in (line[:start], line[start:end], line[end:]))
    if cells(before) + cells(span) + cells(after) <= width:
        return before, span, after
    span = _head(span, width - 4)
    room = width - cells(span)
    if cells(before) > room:
        before = "…" + _tail(before, max(0, room - 2))
    return before, span, _head(after, max(0, width - cells(before) - cells(span)))


def _spaces(text: str) -> str:
    return printable(text.replace("\t", "    "))


def _head(text: str, width: int) -> str:
    if width <= 0:
        return ""
    if cells(text) <= width:
        return text
    kept = text[: width - 1]
    while cells(kept) > width - 1:
        kept = kept[:-1]
    return kept + "…"


def _tail(text: str, width: int) -> str:
    kept = text[max(0, len(text) - width) :] if width else ""
    while cells(kept) > width:
        kept = kept[1:]
    return kept
