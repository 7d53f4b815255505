"""Every figure of a page comes from a file in docs/data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from figures import figures_of, sections, tables_of
from laboratory import chart
from markdown import PAGES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DATA: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "figures.json").read_text(encoding="utf-8"))
MADE_WHOLE = ("docs/coverage.md", "docs/decoding.md", "docs/gpu.md", "docs/reliability.md")
"""Pages that test_coverage, test_decoding, test_gpu and test_reliability compare with what makes them."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_of_a_page_is_one_of_the_data(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    stated = {}
    for title, lines in sections(page):
        figures, tables = figures_of(lines), tables_of(lines)
        if (figures or tables) and name not in MADE_WHOLE:
            stated[title] = (figures, tables)
    recorded = {
        title: (entry.get("figures", []), entry.get("tables", []))
        for title, entry in DATA.get(name, {}).items()
    }
    assert stated == recorded, "docs/data/figures.json: what was measured, by which command, and when"


def test_the_data_says_how_each_figure_was_measured() -> None:
    commands = {path.stem for path in (ROOT / "tools" / "laboratory").iterdir()} | {"matrix"}
    for page, entries in DATA.items():
        assert (ROOT / page).exists()
        for entry in entries.values():
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
            for command in re.findall(r"tools/lab ([\w-]+)", entry["measured_by"]):
                assert command.replace("-", "_") in commands, entry["measured_by"]
            for path in re.findall(r"tests/[\w/.]*\w", entry["measured_by"]):
                assert (ROOT / path).exists(), path
            for file in re.findall(r"[\w.-]+\.jsonl?\b", entry["measured_by"]):
                assert (ROOT / "docs" / "data" / file).exists(), file


def test_a_figure_that_stands_twice_is_the_same_one() -> None:
    for page, entries in DATA.items():
        for title, entry in entries.items():
            if "repeats" in entry:
                held = dict(sections(ROOT / page))[title]
                there = "\n".join(map(section, entry["repeats"]))
                for figure in (*figures_of(held), *figures_of([line.strip("|") for line in held])):
                    number = re.escape(figure.partition(" ")[0])
                    assert re.search(rf"(?<![\d.,]){number}(?!\d)", there), (page, title, figure)


def test_the_counts_of_damaged_architectures_are_those_of_the_survey() -> None:
    survey = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    counts = re.findall(r"^\| S\w+: .*? \| (\d+ of \d+) \|", survey, flags=re.M)
    stated = DATA["docs/am-i-affected.md"]["Which paths do damage"]["figures"]
    assert {figure for figure in stated if " of " in figure} <= set(counts[:6])


def section(name: str) -> str:
    page, _, title = name.partition(": ")
    return "\n".join(dict(sections(ROOT / page))[title])


def test_figures_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\nWith torch 2.4 and 4.57.6 it takes\n1.2 ms, 1,092 and 3 ms, 7 of 10, 1e-3; `9 ms`.\n\n"
        "| a | b |\n|---|---|\n| x | 1 |\n\n```text\n8 ms\n```\n",
        encoding="utf-8",
    )
    (_, (title, lines)) = sections(page)
    assert title == "A"
    assert figures_of(lines) == ["1.2 ms", "1,092 and 3 ms", "7 of 10", "1e-3"]
    assert tables_of(lines) == [[["a", "b"], ["x", "1"]]]
