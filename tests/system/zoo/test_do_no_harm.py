"""First, do no harm: more than eighty styles of position modules under every load path.

Correct without safe_rope: the same with it. Damaged without: correct with it, or named. What runs without
runs with, and gives and saves the same dtypes.
"""

from __future__ import annotations

import json
from pathlib import Path

import harm_cells
import pytest
import transformers
from _environment import pairs
from harm_paths import MORE, PATHS
from styles import STYLES

pytestmark = pytest.mark.usefixtures("deepspeed_group")


DATA = Path(__file__).resolve().parents[2] / "data" / "named_styles.json"
NAMED: dict[str, list[str]] = json.loads(DATA.read_text(encoding="utf-8"))
"""For each load path the styles that are named there and not put right, with the newest pair."""
NEWEST = pairs()[0].name
# Every twelfth style: a sample for the older releases.
CASES = [
    pytest.param(name, index, marks=[] if index % 12 else pytest.mark.contract)
    for index, name in enumerate(STYLES)
]


@pytest.mark.parametrize(("name", "turn"), CASES)
def test_no_style_comes_to_harm(name: str, turn: int, request: pytest.FixtureRequest) -> None:
    """Every load path with ``--all``; without, neighbouring styles share the load paths among them."""
    some = (*PATHS[turn % 4 :: 4], *MORE[turn % 8 : turn % 8 + 1])
    paths = (*PATHS, *MORE) if request.config.getoption("--all") else some
    cells = harm_cells.cells(STYLES[name], paths=paths)
    harm_cells.COLLECTED.extend(cells)
    bad = [cell for cell in cells if cell.kind in harm_cells.BAD]
    assert not bad, "\n".join(["", *map(str, bad)])
    named = [cell for cell in cells if cell.kind == harm_cells.NAMED and name not in NAMED.get(cell.path, ())]
    if f"transformers-{transformers.__version__}" == NEWEST:
        assert not named, "\n".join(["put right before, and only named now:", *map(str, named)])
