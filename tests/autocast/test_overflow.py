"""float16: an overflow on one rank is skipped on all, the scale halves alike, and a checkpoint keeps it."""

from __future__ import annotations

import math
import pickle
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


def test_a_checkpoint_holds_deepspeeds_own_loss_scale_and_the_one_that_the_next_loss_gets() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from safe_rope.autocast.loss_scale import StepLossScaler

    scaler = StepLossScaler()
    scaler.scale_window = 1
    for _ in range(2):
        scaler.update_scale(False)
    assert scaler.cur_scale == 65536.0
    saved = pickle.dumps(scaler, protocol=2)
    assert b"safe_rope" not in saved
    loaded = pickle.loads(saved)
    assert type(loaded) is DynamicLossScaler
    assert loaded.cur_scale == 2 * 65536.0
    assert (loaded.scale_window, loaded.cur_iter) == (1, 2)
