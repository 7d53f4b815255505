"""First, do no harm: more than eighty styles of position modules under every load path.

Correct without safe_rope: the same with it. Damaged without: correct with it, or named. What runs without
runs with, and gives and saves the same dtypes.
"""

from __future__ import annotations

import harm_cells
import pytest
from styles import STYLES

pytestmark = pytest.mark.usefixtures("deepspeed_group")


# Every sixth style: a sample for the older releases.
CASES = [
    pytest.param(name, marks=[] if index % 6 else pytest.mark.contract) for index, name in enumerate(STYLES)
]


@pytest.mark.parametrize("name", CASES)
def test_no_style_comes_to_harm(name: str) -> None:
    cells = harm_cells.cells(STYLES[name])
    harm_cells.COLLECTED.extend(cells)
    bad = [cell for cell in cells if cell.kind in harm_cells.BAD]
    assert not bad, "\n".join(["", *map(str, bad)])
