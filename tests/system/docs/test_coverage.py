"""The pages about coverage and about releases say what the records in docs/data have found."""

from __future__ import annotations

import subprocess
import sys

import _wide
from markdown import ROOT


def test_the_page_is_made_from_the_data() -> None:
    data = sorted((ROOT / "docs" / "data").glob("zoo-*.jsonl"))
    assert len(data) == 3
    command = [ROOT / "tools" / "lab", "zoo", "--here", "--python", sys.executable, "--summary", "--markdown"]
    command += ["--output", data[0], "--more", *data[1:]]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (ROOT / "docs" / "coverage.md").read_text() == printed


def test_the_table_of_environments_is_made_from_the_data() -> None:
    rows = _wide.recorded()
    assert {row["line"] for row in rows} <= set(_wide.listed())
    assert f"{_wide.MARK}{_wide.table(rows)}{_wide.MARK}" in _wide.PAGE.read_text()


def test_what_the_environments_leave_out_is_there() -> None:
    assert [path for path in _wide.LEFT_OUT if not (ROOT / path).exists()] == []
