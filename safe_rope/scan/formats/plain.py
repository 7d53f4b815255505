"""What several formats need: text that is safe to print and how wide it is, and names for findings."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence

from safe_rope.scan.engine import Hit


def printable(text: str) -> str:
    """Return the text with control characters, direction overrides and lone surrogates escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\u3000" or char == "\u00a0" else _escape(char) for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def cells(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(_cells(char) for char in text)


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fingerprints(hits: Sequence[Hit]) -> list[str]:
    """Return for each hit what stays when the code around it moves: a hash of rule, code and repetition."""
    seen: Counter[tuple[str, str, str]] = Counter()
    marks = []
    for hit in hits:
        identity = (hit.finding.path, hit.finding.rule, hit.snippet)
        seen[identity] += 1
        text = f"{hit.finding.rule}\0{hit.snippet}\0{seen[identity]}"
        marks.append(hashlib.sha256(text.encode(errors="replace")).hexdigest())
    return marks
