"""The page about coverage says what the surveys in docs/data have found."""

from __future__ import annotations

import subprocess
import sys

from markdown import ROOT


def test_the_page_is_made_from_the_data() -> None:
    data = sorted((ROOT / "docs" / "data").glob("zoo-*.jsonl"))
    assert len(data) == 3
    command = [ROOT / "tools" / "lab", "zoo", "--here", "--python", sys.executable, "--summary", "--markdown"]
    command += ["--output", data[0], "--more", *data[1:]]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (ROOT / "docs" / "coverage.md").read_text() == printed
