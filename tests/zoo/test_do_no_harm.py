"""First, do no harm: more than eighty styles of position modules under every load path.

Correct without safe_rope: the same with it. Damaged without: correct with it, or named. What runs without
runs with, and gives and saves the same dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator

import harm_cells
import one_rank
import pytest
from styles import STYLES


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    with one_rank.environment():
        deepspeed.init_distributed("gloo")
        one_rank.set_imports_aside()
        yield


@pytest.mark.parametrize("name", STYLES)
def test_no_style_comes_to_harm(name: str) -> None:
    cells = harm_cells.cells(STYLES[name])
    harm_cells.COLLECTED.extend(cells)
    bad = [cell for cell in cells if cell.kind in harm_cells.BAD]
    assert not bad, "\n".join(["", *map(str, bad)])
