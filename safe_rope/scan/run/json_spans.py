"""A JSON reader that knows where in the text every string stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module

# What stands for one character of a string: an escaped surrogate pair, another escape, or itself.
_UNIT = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL
)


class Text(str):
    """A string that knows where the text between its quotes starts and ends."""

    start: int
    end: int

    def spans(self, document: str) -> Iterator[tuple[int, int]]:
        """Yield where in the document each character of the value starts and ends."""
        return (unit.span() for unit in _UNIT.finditer(document, self.start, self.end))


class Spans(json.JSONDecoder):
    """Decodes as the standard library does, with `Text` for every string but keys."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_string = _text
        self.scan_once = import_module("json.scanner").py_make_scanner(self)


def _text(document: str, start: int, strict: bool = True) -> tuple[Text, int]:
    value, end = import_module("json.decoder").scanstring(document, start, strict)
    text = Text(value)
    text.start, text.end = start, end - 1
    return text, end
