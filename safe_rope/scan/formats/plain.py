"""Text that is safe to print: no control characters of a scanned file reach the terminal."""

from __future__ import annotations

import unicodedata


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
