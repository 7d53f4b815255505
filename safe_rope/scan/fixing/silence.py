"""Writes a comment that silences a finding after the statement's line on which it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from safe_rope.scan.engine import FileResult, Hit

_CODES = re.compile(rb"#\s*noqa\s*:\s*[A-Za-z]+[0-9]+(?:[\s,]+[A-Za-z]+[0-9]+\b)*", re.IGNORECASE)


def add_noqa(
    source: bytes, path: str, hits: Iterable[Hit], scan: Callable[[bytes, str], FileResult]
) -> tuple[bytes, int]:
    """Return a file with `# noqa` for these findings, and how many they silence.

    A line that goes on in the next, or ends within a string, takes no comment: its findings stay.

    Args:
        source: the file's bytes, in an encoding that has ASCII.
        path: of the file.
        hits: what to silence.
        scan: says what a scan finds in bytes under a path.
    """
    rules: dict[int, set[str]] = {}
    for hit in hits:
        rules.setdefault(hit.finding.end_line, set()).add(hit.finding.rule)
    silenced = sum(len(hit.silenced_by) > 0 for hit in scan(source, path).hits)
    written = 0
    for line, names in sorted(rules.items()):
        lines = source.splitlines(keepends=True)
        body = lines[line - 1].rstrip(b"\r\n")
        codes = ", ".join(sorted(names)).encode()
        known = _CODES.search(body)
        text = (
            body[: known.end()] + b", " + codes + body[known.end() :]
            if known
            else body + b"  # noqa: " + codes
        )
        changed = b"".join([*lines[: line - 1], text + lines[line - 1][len(body) :], *lines[line:]])
        result = scan(changed, path)
        now = sum(len(hit.silenced_by) > 0 for hit in result.hits)
        if now > silenced and not result.errors:
            source, written, silenced = changed, written + now - silenced, now
    return source, written
