"""JSON: exactly {"findings": […], "errors": […]}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from safe_rope.scan.engine.finding import Finding
from safe_rope.scan.engine.result import Diagnostic, Hit


def render(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return the report; edits of a fix are byte offsets into the file as it was read."""
    document = {
        "findings": [_finding(hit.finding) for hit in hits],
        "errors": [
            {"path": error.path, "line": error.line, "column": error.column, "message": error.message}
            for error in errors
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _finding(finding: Finding) -> dict[str, Any]:
    fix = None
    if finding.fix is not None:
        fix = {
            "safe": finding.fix.safe,
            "description": finding.fix.description,
            "edits": [
                {"start": edit.start, "end": edit.end, "replacement": edit.replacement}
                for edit in finding.fix.edits
            ],
        }
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "end_column": finding.end_column,
        "message": finding.message,
        "fix": fix,
    }
