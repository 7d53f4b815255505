"""float16: an overflow on one rank is skipped on all, the scale halves alike, and a checkpoint keeps it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support import two_ranks


@pytest.mark.slow
@pytest.mark.timeout(530)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_training_goes_on(
    tmp_path: Path, has_autocast: bool
) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    ranks = two_ranks.run("autocast/overflow_worker.py", [str(tmp_path / "checkpoint")], tmp_path, 500)
    assert {"1", "2", "3"} <= ranks[0].keys()
    for stage, seen in ranks[0].items():
        other = ranks[1][stage]
        assert seen["scales"] == [65536.0] * 3 + [32768.0] * 3, stage
        assert other["scales"] == seen["scales"], stage
        assert seen["moved"] == other["moved"] == [True, True, False, True, True, True], stage
        assert seen["skipped"] == other["skipped"] == 1, stage
        assert seen["finite"], stage
        assert all(math.isfinite(loss) for loss in seen["losses"]), stage
        assert seen["loaded"] == other["loaded"] == seen["after"] == 32768.0, stage
        assert seen["same weights"], stage
        assert seen["goes on alike"], stage
        # One update a step, whatever the number of parameter groups: six steps double it twice.
        assert seen["growth"] == other["growth"], stage
        assert seen["growth"][0] == 32768.0, stage
        doublings = [b / a for a, b in zip(seen["growth"], seen["growth"][1:], strict=False)]
        assert sorted(set(doublings)) == [1.0, 2.0], (stage, doublings)
        assert doublings.count(2.0) == 2, (stage, doublings)
