"""The page about reliability says what the record of `tools/lab soak` holds; nothing has failed."""

from __future__ import annotations

import json
from typing import Any

from laboratory.soak import PARTS, RECORD
from laboratory.soak.page import SAID, page
from markdown import ROOT

FOUND: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_page_is_made_from_the_record() -> None:
    shown = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert shown == page(FOUND), "run: tools/lab soak --page > docs/reliability.md"


def test_nothing_of_what_is_recorded_has_failed() -> None:
    assert list(FOUND) == list(PARTS) == list(SAID)
    for name, part in FOUND.items():
        for kind, entry in part["kinds"].items():
            assert entry["tries"] > 0, (name, kind)
            assert not entry["failed"], (name, kind, entry["failures"])
