"""The page about decoding says what the record of `tools/lab bench decode` holds."""

from __future__ import annotations

import json
from typing import Any

from laboratory.bench.decode import RECORD
from laboratory.bench.decode_page import page
from markdown import ROOT

CALLS_MORE = {"deepseek_v2", "llama4_text"}
"""Architectures of which a step of decoding calls one operator more."""
FOUND: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_page_is_made_from_the_record() -> None:
    shown = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    assert shown == page(FOUND), "run: tools/lab bench decode --page > docs/decoding.md"


def test_a_step_calls_no_more_operators_than_stock() -> None:
    measured = [row for row in FOUND["rows"] if any("ratio" in case for case in row.get("cases", ()))]
    assert len(measured) >= 25
    more = {
        row["model_type"]
        for row in measured
        for case in row["cases"]
        if case["what"] == "decode" and case["operators"][1] > case["operators"][0]
    }
    assert more == CALLS_MORE
