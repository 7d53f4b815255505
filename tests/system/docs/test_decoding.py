"""The page about decoding says what the record of `tools/lab bench decode` holds."""

from __future__ import annotations

import json
from typing import Any

from laboratory.bench.decode import RECORD
from laboratory.bench.decode_page import page
from markdown import ROOT

FOUND: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_page_is_made_from_the_record() -> None:
    shown = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    assert shown == page(FOUND), "run: tools/lab bench decode --page > docs/decoding.md"


def test_a_step_calls_no_more_operators_than_stock() -> None:
    steps = [
        (row["model_type"], case["operators"])
        for row in FOUND["rows"]
        for case in row.get("cases", ())
        if case["what"] == "decode" and "ratio" in case
    ]
    assert len({name for name, _ in steps}) >= 25
    assert [(name, counts) for name, counts in steps if counts[1] > counts[0]] == []
