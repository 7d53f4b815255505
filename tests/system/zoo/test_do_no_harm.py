"""First, do no harm: more than eighty styles of position modules under every load path.

Correct without safe_rope: the same with it. Damaged without: correct with it, or named. What runs without
runs with, and gives and saves the same dtypes.
"""

from __future__ import annotations

import harm_cells
import pytest
from harm_paths import MORE, PATHS
from styles import STYLES

pytestmark = pytest.mark.usefixtures("deepspeed_group")


# Every sixth style: a sample for the older releases.
CASES = [
    pytest.param(name, index, marks=[] if index % 6 else pytest.mark.contract)
    for index, name in enumerate(STYLES)
]


@pytest.mark.parametrize(("name", "turn"), CASES)
def test_no_style_comes_to_harm(name: str, turn: int, request: pytest.FixtureRequest) -> None:
    """Every load path with ``--all``; without, three neighbouring styles share the load paths among them."""
    some = (*PATHS[turn % 3 :: 3], MORE[turn % 3])
    paths = (*PATHS, *MORE) if request.config.getoption("--all") else some
    cells = harm_cells.cells(STYLES[name], paths=paths)
    harm_cells.COLLECTED.extend(cells)
    bad = [cell for cell in cells if cell.kind in harm_cells.BAD]
    assert not bad, "\n".join(["", *map(str, bad)])
