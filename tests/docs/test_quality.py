"""The experiment of docs/does-it-matter.md: its task asks what it says, and the model learns it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from markdown import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import _quality_task as task


def test_every_answer_is_the_content_that_stands_that_far_back() -> None:
    ids, answers, distances = task.sequences(2, 512, torch.Generator().manual_seed(0))
    checked = 0
    for row in range(2):
        for index in range(256):
            place = 2 * index - int(distances[row, index])
            assert ids[row, 2 * index + 1] - task.CONTENT == task.DISTANCES.index(int(distances[row, index]))
            if place < 0:
                assert answers[row, index] == task.NO_ANSWER
            else:
                assert answers[row, index] == ids[row, place]
                checked += 1
    assert checked == 510


@pytest.mark.slow
def test_the_model_learns_it_and_needs_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "SCHEDULE", ((256, 8, 80),))
    monkeypatch.setattr(task, "CONTEXT", 256)
    monkeypatch.setattr(task, "POSITION_BINS", (0, 128, 256))
    monkeypatch.setattr(task, "DISTANCES", task.DISTANCES[:6])
    monkeypatch.setattr(task, "_DISTANCES", torch.tensor(task.DISTANCES))
    model: Any = task.new_model(seed=0)
    curve = task.train(model, 0, lambda step: None)
    assert curve[0][1] < 0.2
    assert task.evaluate(model, count=8)["accuracy"] > 0.95
    for module in model.modules():  # all positions the same
        if hasattr(module, "inv_freq"):
            module.inv_freq.zero_()
            if hasattr(module, "cos_cached"):
                module._set_cos_sin_cache(256, "cpu", torch.float32)
    assert task.evaluate(model, count=8)["accuracy"] < 0.2
