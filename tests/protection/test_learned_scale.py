"""A rotary forward that reads tensors beside its frequencies computes from what those hold later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.learned_scale import (
    POSITIONS,
    BufferedLater,
    Holder,
    LearnedScale,
    ScaledLater,
    learned,
    true_tables,
)
from torch import nn

import safe_rope

pytestmark = pytest.mark.contract


def _load(rotary: nn.Module) -> None:
    rotary.load_state_dict({"alpha": learned()})


def _assign(rotary: nn.Module) -> None:
    rotary.load_state_dict({"alpha": learned()}, assign=True)


def _write(rotary: nn.Module) -> None:
    rotary.alpha.copy_(learned())


@pytest.mark.parametrize("tables", ["exact", "fp32"])
@pytest.mark.parametrize("fill", [_load, _assign, _write])
def test_what_a_file_fills_takes_part(fill: Callable[[nn.Module], None], tables: str) -> None:
    with safe_rope.guard(tables=tables):
        model = Holder()
    fill(model.rotary)
    for actual, expected in zip(model.rotary(torch.zeros(1), POSITIONS), true_tables(), strict=True):
        assert torch.equal(actual, expected)


def test_what_a_file_has_filled_takes_part() -> None:
    model = Holder()
    _load(model.rotary)
    safe_rope.protect(model)
    for actual, expected in zip(model.rotary(torch.zeros(1), POSITIONS), true_tables(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("cls", [ScaledLater, BufferedLater])
def test_a_tensor_in_the_place_of_nothing_takes_part(cls: type[nn.Module]) -> None:
    with safe_rope.guard():
        model = Holder(cls)
    model.rotary(torch.zeros(1), POSITIONS)
    model.rotary.alpha = learned()
    for actual, expected in zip(model.rotary(torch.zeros(1), POSITIONS), true_tables(), strict=True):
        assert torch.equal(actual, expected)


def test_frequencies_beside_it_stay_in_fp32() -> None:
    with safe_rope.guard():
        model = Holder().to(torch.bfloat16)
    model.rotary.alpha = learned()
    for actual, expected in zip(model.rotary(torch.zeros(1), POSITIONS), true_tables(), strict=True):
        assert torch.equal(actual, expected)


def test_the_stock_class_does_so() -> None:
    rotary = LearnedScale()
    before = rotary(torch.zeros(1), POSITIONS)
    assert all(not torch.equal(*pair) for pair in zip(before, true_tables(), strict=True))
