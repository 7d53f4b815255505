"""Position modules that a grammar draws come to no harm, and the audit's verdict on them is right."""

from __future__ import annotations

from pathlib import Path

import audit_cells
import drawn
import harm_cells
import pytest
from harm_paths import MORE, PATHS
from styles import STYLES

pytestmark = pytest.mark.usefixtures("deepspeed_group")

FEW, MANY = 24, 400
NUMBERS = [pytest.param(n, marks=[] if n < FEW else pytest.mark.exhaustive) for n in range(MANY)]


@pytest.fixture
def name(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the style that a number draws, which is registered for one test."""
    style = drawn.style(number, tmp_path)
    monkeypatch.setitem(STYLES, style.name, style)
    return style.name


@pytest.mark.parametrize("number", NUMBERS)
def test_no_drawn_style_comes_to_harm(name: str, number: int, request: pytest.FixtureRequest) -> None:
    """Every load path with ``--all``; without, each style meets a quarter of them."""
    every = (*PATHS, *MORE)
    paths = every if request.config.getoption("--all") else every[number % 4 :: 4]
    found = harm_cells.cells(STYLES[name], paths=paths)
    bad = [cell for cell in found if cell.kind in harm_cells.BAD]
    assert not bad, "\n".join(["", *map(str, bad), drawn.source(number)])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_style_gets_a_right_verdict(name: str, number: int, request: pytest.FixtureRequest) -> None:
    """Every load path with ``--all``; without, each style meets a quarter of them."""
    every = audit_cells.PATHS
    paths = every if request.config.getoption("--all") else every[number % 4 :: 4]
    seen = [audit_cells.look(STYLES[name], path) for path in paths]
    wrong = [one.problem for one in seen if one is not None and one.problem is not None]
    assert not wrong, "\n".join(["", *wrong, drawn.source(number)])
