"""The experiment of docs/does-it-matter.md: its task asks what it says, and the model learns it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laboratory.quality import task


@pytest.mark.parametrize("stride", [1, 16])
def test_every_answer_is_the_content_that_stands_that_far_back(stride: int) -> None:
    batch = task.sequences(2, 512, stride, torch.Generator().manual_seed(0))
    checked = 0
    for row in range(2):
        at = {int(p): int(token) for p, token in zip(batch.positions[row], batch.ids[row], strict=True)}
        for index in range(256):
            question, answer = int(batch.questions[row, index]), int(batch.answers[row, index])
            assert batch.ids[row, 2 * index + 1] == task.CONTENT + question
            if answer != task.NO_ANSWER:
                distance = stride * task.DISTANCES[question]
                assert at[int(batch.positions[row, 2 * index]) - distance] == answer
                checked += 1
    assert checked == 510


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 16])
def test_the_model_learns_it_and_needs_its_positions(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "SCHEDULE", ((256, 8, 80),))
    monkeypatch.setattr(task, "CONTEXT", 256)
    monkeypatch.setattr(task, "PLACE_BINS", (0, 128, 256))
    model: Any = task.new_model(seed=0, stride=stride)
    if stride > 1 and not task.knows_positions(model):
        pytest.skip("this transformers knows no positions but those of the places")
    curve = task.train(model, 0, stride, lambda step: None)
    assert curve[0][1] < 0.2
    assert task.evaluate(model, stride, count=8)["accuracy"] > 0.9
    for module in model.modules():  # all positions the same
        if hasattr(module, "inv_freq"):
            module.inv_freq.zero_()
            if hasattr(module, "cos_cached"):
                module._set_cos_sin_cache(256, "cpu", torch.float32)
    assert task.evaluate(model, stride, count=8)["accuracy"] < 0.2
