"""The page about GPUs says what the records of `tools/lab gpu` hold."""

from __future__ import annotations

from laboratory.gpu import records
from laboratory.gpu.page import page
from markdown import ROOT


def test_the_page_is_made_from_the_records() -> None:
    shown = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert shown == page(records()), "run: tools/lab gpu --page > docs/gpu.md"
