"""Position modules that a grammar draws come to no harm, and the audit's verdict on them is right."""

from __future__ import annotations

from pathlib import Path

import audit_cells
import drawn
import drawn_kept
import harm_cells
import pytest
from harm_paths import MORE, PATHS
from styles import STYLES

pytestmark = pytest.mark.usefixtures("deepspeed_group")

GRAMMARS = {"written": drawn.source, "kept": drawn_kept.source}
FEW, MANY = 24, 400
DRAWS = [
    pytest.param(grammar, number, marks=[] if number < FEW else pytest.mark.exhaustive)
    for grammar in GRAMMARS
    for number in range(MANY)
]


@pytest.fixture
def name(grammar: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the style that a number draws, which is registered for one test."""
    widens = grammar == "kept"  # some take a table in the dtype that it is kept in
    style = drawn.style(GRAMMARS[grammar](number), f"drawn_{grammar}_{number}", tmp_path, widens=widens)
    monkeypatch.setitem(STYLES, style.name, style)
    return style.name


@pytest.mark.parametrize(("grammar", "number"), DRAWS)
def test_no_drawn_style_comes_to_harm(
    name: str, grammar: str, number: int, request: pytest.FixtureRequest
) -> None:
    """Every load path with ``--all``; without, each style meets a quarter of them."""
    every = (*PATHS, *MORE)
    paths = every if request.config.getoption("--all") else every[number % 4 :: 4]
    found = harm_cells.cells(STYLES[name], paths=paths)
    bad = [cell for cell in found if cell.kind in harm_cells.BAD]
    assert not bad, "\n".join(["", *map(str, bad), GRAMMARS[grammar](number)])


@pytest.mark.parametrize(("grammar", "number"), DRAWS)
def test_a_drawn_style_gets_a_right_verdict(
    name: str, grammar: str, number: int, request: pytest.FixtureRequest
) -> None:
    """Every load path with ``--all``; without, each style meets a quarter of them."""
    every = audit_cells.PATHS
    paths = every if request.config.getoption("--all") else every[number % 4 :: 4]
    seen = [audit_cells.look(STYLES[name], path) for path in paths]
    wrong = [one.problem for one in seen if one is not None and one.problem is not None]
    assert not wrong, "\n".join(["", *wrong, GRAMMARS[grammar](number)])
