"""Every figure of the README comes from a file in docs/data."""

from __future__ import annotations

import json
import re

import pytest
from laboratory import chart
from markdown import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = re.compile(r"\d[\d.,]*(?: to \d+)? (?:ms|s|min|minutes|seconds|MB|GB|%|times)\b|\d[\d.]* %")


def test_the_chart_is_drawn_from_the_data() -> None:
    found = json.loads(chart.DATA.read_text(encoding="utf-8"))
    for name, theme in chart.THEMES.items():
        drawn = (ROOT / "docs" / f"error-{name}.svg").read_text(encoding="utf-8")
        assert drawn == chart.draw(found, theme), "run: tools/lab chart"


def test_the_verdict_that_the_readme_shows_is_that_of_the_data() -> None:
    found = json.loads(chart.DATA.read_text(encoding="utf-8"))
    for entry in found["paths"]:
        rows = [row for row in entry["stock"]["rows"] if row["position"] < found["max_position_embeddings"]]
        worst = max(rows, key=lambda row: row["phase_error_rad"])
        (shown,) = (line for line in README.splitlines() if line.startswith(entry["path"] + "  "))
        radians, at = re.findall(r"([\d.]+) at ([\d,]+) ", shown)[0]
        assert float(radians) == pytest.approx(worst["phase_error_rad"], rel=0.01)
        assert int(at.replace(",", "")) == worst["position"]


def test_what_it_costs_was_measured() -> None:
    costs = json.loads((ROOT / "docs" / "data" / "costs.json").read_text(encoding="utf-8"))["README.md"]
    prose = re.sub(r"^```.*?^```", "", README, flags=re.S | re.M)
    figures = {match.group() for match in MEASURED.finditer(prose)} - {"100 %"}
    assert figures == set(costs)
