"""SARIF 2.1.0, as GitHub code scanning and editors read it.

Source: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", sarif-schema-2.1.0.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

from safe_rope._base.version import VERSION
from safe_rope.scan.engine import Diagnostic, Fix, Hit
from safe_rope.scan.formats.plain import fingerprints
from safe_rope.scan.rules import RULES, Rule

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return a log with one run; files that could not be scanned are notifications of the tool."""
    rules = list(RULES)
    marked = zip(hits, fingerprints(hits), strict=True)
    results = [_result(hit, rules.index(hit.finding.rule), mark) for hit, mark in marked]
    driver = {"name": "safe-rope", "semanticVersion": VERSION, "rules": [*map(_rule, RULES.values())]}
    notifications = [_notification(error) for error in errors]
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": not errors, "toolExecutionNotifications": notifications}],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.explanation},
        "defaultConfiguration": {"level": rule.severity},
    }


def _result(hit: Hit, rule_index: int, fingerprint: str) -> dict[str, Any]:
    finding = hit.finding
    region = {
        "startLine": finding.line,
        "startColumn": finding.column,
        "endLine": finding.end_line,
        "endColumn": finding.end_column,
    }
    place = {"artifactLocation": {"uri": _uri(finding.path)}, "region": region}
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": finding.severity,
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"safeRopeFinding/v1": fingerprint},
    }
    if finding.fix is not None:
        result["fixes"] = [_fix(finding.path, finding.fix)]
    return result


def _fix(path: str, fix: Fix) -> dict[str, Any]:
    replacements = [
        {
            "deletedRegion": {"byteOffset": edit.start, "byteLength": edit.end - edit.start},
            "insertedContent": {"text": edit.replacement},
        }
        for edit in fix.edits
    ]
    return {
        "description": {"text": f"{fix.description} ({'safe' if fix.safe else 'unsafe'})"},
        "artifactChanges": [{"artifactLocation": {"uri": _uri(path)}, "replacements": replacements}],
    }


def _notification(error: Diagnostic) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(error.path)}}
    if error.line > 0:
        place["region"] = {"startLine": error.line, "startColumn": max(error.column, 1)}
    locations = [{"physicalLocation": place}]
    return {"level": "error", "message": {"text": error.message}, "locations": locations}


def _uri(path: str) -> str:
    if os.path.isabs(path):
        return Path(path).as_uri()
    return quote_from_bytes(os.fsencode(path.replace(os.sep, "/")))
