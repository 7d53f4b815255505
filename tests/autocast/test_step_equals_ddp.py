"""Two ranks, one tied Llama, ZeRO 2 and 3: the training of `test_two_ranks` in small, for every run."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_two_ranks import assert_training_equals_ddp, run

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


def test_a_step_equals_ddp_with_autocast(tmp_path: Path) -> None:
    parity = {"which": "every_day", "steps": 1, "pairs": [("llama tied", "bfloat16")]}
    assert_training_equals_ddp([rank["parity"] for rank in run({"parity": parity}, tmp_path)])
