"""JSON: exactly {"findings": […], "errors": […]}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from safe_rope.scan.engine import Diagnostic, Hit


def render(hits: Sequence[Hit], errors: Sequence[Diagnostic]) -> str:
    """Return the report; edits of a fix are byte offsets into the file as it was read."""
    document = {
        "findings": [asdict(hit.finding) for hit in hits],
        "errors": [asdict(error) for error in errors],
    }
    return json.dumps(document, indent=2) + "\n"
