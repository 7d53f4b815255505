"""GitHub workflow commands: each finding annotates its lines of the pull request.

Source: docs.github.com, "Workflow commands for GitHub Actions", and actions/toolkit's escaping rules.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from safe_rope.scan.engine import Diagnostic, Hit

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def render(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return one command per line."""
    lines = []
    for error in errors:
        place: dict[str, object] = {"file": _file(error.path)}
        if error.line:
            place |= {"line": error.line, "col": max(error.column, 1)}
        lines.append(_command("error", place | {"title": "safe-rope"}, error.message))
    for hit in hits:
        finding = hit.finding
        place = {"file": _file(finding.path), "line": finding.line, "endLine": finding.end_line}
        if finding.line == finding.end_line:  # columns across lines are refused; the end is inclusive there
            place |= {"col": finding.column, "endColumn": max(finding.column, finding.end_column - 1)}
        place["title"] = f"safe-rope {finding.rule}"
        lines.append(_command(_LEVELS[finding.severity], place, finding.message))
    return "".join(line + "\n" for line in lines)


def _file(path: str) -> str:
    return path.replace(os.sep, "/")


def _command(level: str, properties: dict[str, object], message: str) -> str:
    listed = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{level} {listed}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
