"""SafeRopeCallback in the real Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from train import Numbers, training_arguments
from transformers import Trainer

import safe_rope
from safe_rope.integrations import SafeRopeCallback

pytestmark = pytest.mark.contract


def trainer(model: Any, callback: SafeRopeCallback, folder: Path) -> Trainer:
    return Trainer(
        model=model,
        args=training_arguments(str(folder), disable_tqdm=True),
        train_dataset=Numbers(),
        callbacks=[callback],
    )


def test_damaged_tables_fail_the_run_before_its_first_step(tmp_path: Path) -> None:
    model = families.build("llama").to(torch.bfloat16)
    if not safe_rope.audit(model).damaged:
        pytest.fail("a cast to bfloat16 was expected to damage the stock model")
    callback = SafeRopeCallback()
    training = trainer(model, callback, tmp_path)
    with pytest.raises(safe_rope.DamagedTablesError, match="rotary_emb"):
        training.train()
    assert training.state.global_step == 0
    assert callback.report is not None
    assert callback.report.damaged


def test_a_protected_model_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with safe_rope.guard():
        model = families.build("llama")
    model.to(torch.bfloat16)
    callback = SafeRopeCallback()
    training = trainer(model, callback, tmp_path)
    with caplog.at_level(logging.INFO, logger="safe_rope.integrations.trainer"):
        training.train()
    assert training.state.global_step == 2
    assert callback.report is not None
    assert callback.report.ok
    assert "audited before training: none is damaged" in caplog.text


def test_a_repaired_model_trains(tmp_path: Path) -> None:
    model = families.build("llama").to(torch.bfloat16)
    safe_rope.protect(model)
    training = trainer(model, SafeRopeCallback(), tmp_path)
    training.train()
    assert training.state.global_step == 2
