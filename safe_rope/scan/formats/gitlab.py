"""GitLab's code quality report, which annotates a merge request.

Source: docs.gitlab.com, "Code Quality", report format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

from safe_rope.scan.engine import Diagnostic, Hit
from safe_rope.scan.formats.plain import fingerprints

_SEVERITIES = {"error": "major", "warning": "minor", "note": "info"}


def render(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return a list of issues; a file that could not be scanned is a critical one."""
    issues = [
        _issue("scan", f"not scanned: {error.message}", "critical", error.path, error.line, str(error))
        for error in errors
    ]
    for hit, mark in zip(hits, fingerprints(hits), strict=True):
        one = hit.finding
        severity = _SEVERITIES[one.severity]
        issues.append(_issue(one.rule, f"{one.rule}: {one.message}", severity, one.path, one.line, mark))
    return json.dumps(issues, indent=2) + "\n"


def _issue(check: str, description: str, severity: str, path: str, line: int, mark: str) -> dict[str, object]:
    path = path.replace(os.sep, "/")
    location = {"path": path, "lines": {"begin": max(line, 1)}}
    # GitLab tells issues apart by the fingerprint alone, also those of two files.
    fingerprint = hashlib.sha256(f"{path}\0{mark}".encode(errors="replace")).hexdigest()
    named = {"check_name": check, "description": description, "fingerprint": fingerprint}
    return {**named, "severity": severity, "location": location}
