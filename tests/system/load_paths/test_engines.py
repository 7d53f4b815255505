"""A protected model for the rest of its life: after the guard, beside other engines, after its engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support import families
from support.load_paths import PATHS, batch, engine, from_pretrained, train
from support.true_tables import assert_true

import safe_rope

pytestmark = [pytest.mark.usefixtures("deepspeed_state"), pytest.mark.contract]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_model_outlives_its_guard_and_its_engine(family: str, checkpoints: dict[str, Path]) -> None:
    with safe_rope.guard():
        model = from_pretrained(family, checkpoints[family])
    loaded = engine(model, 2)
    train(loaded)
    loaded.destroy()
    del loaded
    assert_true(model, family, "exact")
    with torch.no_grad():
        before = model.eval()(batch(), use_cache=False).logits
        assert before.isfinite().all()
        model.to(torch.float16).to(torch.bfloat16)
        assert_true(model, family, "exact")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_two_engines_in_one_process_keep_their_own_tables(family: str, checkpoints: dict[str, Path]) -> None:
    with safe_rope.guard(tables="exact"):
        first = PATHS["from_pretrained + ZeRO-3"](family, checkpoints[family])
    with safe_rope.guard(tables="fp32"):
        second = PATHS["from_pretrained + ZeRO-2"](family, checkpoints[family])
    for _ in range(2):
        losses = [*train(first), *train(second)]
        assert all(math.isfinite(loss) for loss in losses)
        assert_true(first, family, "exact")
        assert_true(second, family, "fp32")
    first.destroy()
    train(second)
    assert_true(second, family, "fp32")
    second.destroy()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_engine_set_up_on_an_existing_model_can_be_protected(
    family: str, checkpoints: dict[str, Path]
) -> None:
    loaded = PATHS["from_pretrained + ZeRO-2"](family, checkpoints[family])
    loaded.module.to(torch.bfloat16)
    safe_rope.protect(loaded)
    assert_true(loaded, family, "exact")
    train(loaded)
    assert_true(loaded, family, "exact")
    loaded.destroy()
