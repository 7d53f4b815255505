"""A JSON reader that knows where in the text every string stands; the values of other scalars are dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
# What stands for one character of a string: an escaped surrogate pair, another escape, or itself.
_UNIT = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL
)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A string: its value, and where the text between its quotes starts and ends."""

    value: str
    start: int
    end: int

    def spans(self, document: str) -> Iterator[tuple[int, int]]:
        """Yield where in the document each character of the value starts and ends."""
        return (unit.span() for unit in _UNIT.finditer(document, self.start, self.end))


def parse(document: str) -> object:
    """Return a document's objects and lists as dict and list, its strings as `Text`, all else as None.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deep.
    """
    json.loads(document)
    tokens = _TOKEN.finditer(document)
    return _value(next(tokens), tokens)


def _value(token: re.Match[str], tokens: Iterator[re.Match[str]]) -> object:
    match token[0][0]:
        case '"':
            return Text(json.loads(token[0]), token.start() + 1, token.end() - 1)
        case "{":
            pairs = ((json.loads(key[0]), next(tokens), next(tokens)) for key in _members(tokens))
            return {key: _value(value, tokens) for key, _colon, value in pairs}
        case "[":
            return [_value(item, tokens) for item in _members(tokens)]
    return None


def _members(tokens: Iterator[re.Match[str]]) -> Iterator[re.Match[str]]:
    """Yield the token with which each member of an object or a list begins, up to the closing bracket."""
    while (token := next(tokens))[0] not in ("}", "]"):
        if token[0] != ",":
            yield token
