"""SafeRopeCallback in the real Trainer."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from train import Numbers, training_arguments
from transformers import Trainer, TrainerCallback

import safe_rope
from safe_rope.errors import ConfigError, PrecisionWarning
from safe_rope.integrations import SafeRopeCallback

pytestmark = pytest.mark.contract


def trainer(model: Any, callback: SafeRopeCallback, folder: Path) -> Trainer:
    pytest.importorskip("accelerate", reason="the Trainer needs it")
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
    with caplog.at_level(logging.INFO, logger="safe_rope.integrations.checked"):
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


class Listener(TrainerCallback):
    """Stands where wandb's and TensorBoard's callbacks stand: before the user's own."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs or {}))


def test_what_was_found_is_in_the_trainers_log(tmp_path: Path) -> None:
    model = families.build("llama").to(torch.bfloat16)
    training = trainer(model, SafeRopeCallback(action="warn"), tmp_path)
    listener = Listener()
    training.callback_handler.callbacks.insert(0, listener)
    with pytest.warns(PrecisionWarning, match="DAMAGED"):
        training.train()
    assert training.state.global_step == 2
    logged = listener.logged[0]
    assert logged["safe_rope/max_phase_error_rad"] > 0.1
    assert logged["safe_rope/damaged"] == logged["safe_rope/modules"] > logged["safe_rope/protected"] == 0
    assert training.state.log_history[0] == {**logged, "step": 0}


class Untold(torch.nn.Module):
    """Nobody can say what its constructor was called with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, count, 2).float() / count)))


def test_what_cannot_be_told_does_not_pass(tmp_path: Path) -> None:
    model = families.build("llama")
    model.own_positions = Untold(32)
    with pytest.raises(safe_rope.DamagedTablesError, match=r"modules unknown(?s:.*)own_positions"):
        trainer(model, SafeRopeCallback(), tmp_path).train()
    with pytest.raises(ConfigError, match='"raise" or "warn", got'):
        SafeRopeCallback("log")  # type: ignore[arg-type]


def guarded() -> Any:
    with safe_rope.guard():
        return families.build("llama")


def test_a_damaged_reference_model_fails_the_run(tmp_path: Path) -> None:
    training = trainer(guarded(), SafeRopeCallback(), tmp_path)
    training.ref_model = families.build("llama").to(torch.bfloat16)
    with pytest.raises(safe_rope.DamagedTablesError, match=r"the trainer's ref_model: (?s:.*)rotary_emb"):
        training.train()
    assert training.state.global_step == 0
    training = trainer(guarded(), SafeRopeCallback(action="warn"), tmp_path)
    training.reward_funcs = [len, families.build("llama").to(torch.bfloat16)]
    with pytest.warns(PrecisionWarning, match=r"the trainer's reward_funcs\[1\]: DAMAGED"):
        training.train()


@pytest.mark.parametrize("less", ["ref_model", "model"])
def test_a_model_and_its_reference_are_protected_alike(less: str, tmp_path: Path) -> None:
    stock = families.build("llama")
    callback = SafeRopeCallback()
    training = trainer(guarded() if less == "ref_model" else stock, callback, tmp_path)
    training.ref_model = stock if less == "ref_model" else guarded()
    with pytest.warns(PrecisionWarning, match=rf"model and its ref_model(?s:.*)load the {less} inside"):
        training.train()
    assert training.state.global_step == 2
    assert callback.others["ref_model"].ok


def test_what_is_protected_alike_is_told_of_nowhere(tmp_path: Path) -> None:
    callback = SafeRopeCallback()
    training = trainer(guarded(), callback, tmp_path)
    training.ref_model = guarded()
    training.same_model = training.model
    training.other_rope = families.build("gpt_neox")
    training.loss = torch.nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        training.train()
    assert set(callback.others) == {"ref_model", "other_rope", "loss"}
