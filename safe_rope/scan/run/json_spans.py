"""A JSON reader that knows where in the text every string stands; the values of other scalars are dropped."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[-+.\w]+")
# What stands for one character of a string: an escaped surrogate pair, another escape, or itself.
_UNIT = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Text:
    """A string: its value, and where the text between its quotes starts and ends."""

    value: str
    start: int
    end: int

    def raw(self, document: str, offset: int) -> int:
        """Return where in the document the character at an offset into the value starts."""
        if self.end - self.start == len(self.value):
            return self.start + offset
        place = self.start
        for _ in range(offset):
            unit = _UNIT.match(document, place, self.end)
            assert unit is not None
            place = unit.end()
        return place


def parse(document: str) -> object:
    """Return a document's objects and lists as dict and list, its strings as `Text`, all else as None.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deep.
    """
    json.loads(document)
    return _value(document, _skip(document, 0))[0]


def _skip(document: str, place: int) -> int:
    match = _SPACE.match(document, place)
    return place if match is None else match.end()


def _value(document: str, place: int) -> tuple[object, int]:
    """Read the value that starts at a place; return it and the place after it."""
    kind = document[place]
    if kind == '"':
        value, end = scanstring(document, place + 1, True)
        return Text(value, place + 1, end - 1), end
    if kind == "{":
        return _object(document, place)
    if kind == "[":
        return _list(document, place)
    match = _SCALAR.match(document, place)
    return None, place + 1 if match is None else match.end()


def _object(document: str, place: int) -> tuple[dict[str, object], int]:
    items: dict[str, object] = {}
    place = _skip(document, place + 1)
    while document[place] != "}":
        key, place = scanstring(document, place + 1, True)
        place = _skip(document, _skip(document, place) + 1)
        items[key], place = _value(document, place)
        place = _skip(document, place)
        if document[place] == ",":
            place = _skip(document, place + 1)
    return items, place + 1


def _list(document: str, place: int) -> tuple[list[object], int]:
    items: list[object] = []
    place = _skip(document, place + 1)
    while document[place] != "]":
        item, place = _value(document, place)
        items.append(item)
        place = _skip(document, place)
        if document[place] == ",":
            place = _skip(document, place + 1)
    return items, place + 1
