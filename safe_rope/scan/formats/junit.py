"""JUnit's XML: a suite for each file, in it a failure for each finding; most CI servers show it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree

from safe_rope.scan.engine import Diagnostic, Hit

# XML 1.0 has no way to write these.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def render(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return a report; without anything to report it has one suite that passed."""
    found = [
        (hit.finding.path, hit.finding.rule, hit.finding.line, hit.finding.message, "failure") for hit in hits
    ]
    found += [(error.path, "scan", error.line, error.message, "error") for error in errors]
    counts = {
        "name": "safe-rope",
        "tests": str(len(found) or 1),
        "failures": str(len(hits)),
        "errors": str(len(errors)),
    }
    root = ElementTree.Element("testsuites", counts)
    for path, group in groupby(found or [("safe-rope", "", 0, "", "")], key=lambda case: case[0]):
        cases = list(group)
        suite = ElementTree.SubElement(root, "testsuite", name=_text(path), tests=str(len(cases)))
        for _, rule, line, message, kind in cases:
            names = {"name": rule or "no findings", "classname": _text(path), "line": str(line)}
            case = ElementTree.SubElement(suite, "testcase", names)
            if kind:
                ElementTree.SubElement(
                    case, kind, message=_text(message)
                ).text = f"line {line}: {_text(message)}"
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode") + "\n"


def _text(text: str) -> str:
    return _UNWRITABLE.sub("?", text)
