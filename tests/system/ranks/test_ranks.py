"""Two processes, ZeRO-3, bfloat16: every rank has true tables, and the ranks agree."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support import two_ranks

pytestmark = pytest.mark.contract

SECONDS = 400


@pytest.mark.timeout(SECONDS + 30)
def test_two_ranks_train_with_true_tables_and_equal_losses(tmp_path: Path) -> None:
    seen = two_ranks.run("system/ranks/rank_worker.py", ["llama"], tmp_path, SECONDS)
    assert all(math.isfinite(loss) for loss in seen[0]["losses"])
    assert seen[0]["losses"] == seen[1]["losses"]
    for one in seen:
        assert one["ulps"] <= 1.0
        assert one["share"] < 1.0  # the parameters really are partitioned
