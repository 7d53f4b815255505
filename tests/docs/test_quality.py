"""The experiment of docs/does-it-matter.md: its task asks what it says, and the model learns it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from markdown import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import _quality_task as task


@pytest.mark.parametrize("gap", [0, task.GAP])
def test_every_answer_is_the_content_that_stands_that_far_back(gap: int) -> None:
    batch = task.sequences(2, 512, gap, torch.Generator().manual_seed(0))
    distances = [*task.NEAR, *(gap + distance for distance in task.FAR)]
    checked = 0
    for row in range(2):
        at = {
            int(position): int(token)
            for position, token in zip(batch.positions[row], batch.ids[row], strict=True)
        }
        for index in range(256):
            question, answer = int(batch.questions[row, index]), int(batch.answers[row, index])
            assert batch.ids[row, 2 * index + 1] == task.CONTENT + question
            if answer != task.NO_ANSWER:
                assert at[int(batch.positions[row, 2 * index]) - distances[question]] == answer
                checked += 1
    assert checked > 480


@pytest.mark.slow
def test_the_model_learns_it_and_needs_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "SCHEDULE", ((256, 8, 120),))
    monkeypatch.setattr(task, "CONTEXT", 256)
    monkeypatch.setattr(task, "PLACE_BINS", (0, 128, 256))
    model: Any = task.new_model(seed=0)
    gap = task.gap_of(model)
    curve = task.train(model, 0, lambda step: None)
    assert curve[0][1] < 0.2
    assert task.evaluate(model, gap, count=8)["near"]["accuracy"] > 0.9
    for module in model.modules():  # all positions the same
        if hasattr(module, "inv_freq"):
            module.inv_freq.zero_()
            if hasattr(module, "cos_cached"):
                module._set_cos_sin_cache(task.GAP, "cpu", torch.float32)
    assert task.evaluate(model, gap, count=8)["near"]["accuracy"] < 0.2
