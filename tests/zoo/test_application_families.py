"""Every family's q and k are rotated in FP32 and rounded once, measured in its own running model in BF16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotated import Recorder, errors
from small_families import FAMILIES, build, present

import safe_rope

HALF = 0.501
"""One rounding is off by half a unit; what it rounds carries FP32's own."""


def run(model: Any, inputs: dict[str, Any]) -> Recorder:
    with Recorder(model) as recorder, torch.no_grad():
        model(**inputs)
    assert recorder.calls, "the model rotates"
    return recorder


def lowered(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(torch.bfloat16) if v.is_floating_point() else v for name, v in inputs.items()}


@pytest.mark.parametrize("family", present(FAMILIES))
def test_a_family_is_rotated_in_fp32_and_rounded_once(family: str) -> None:
    case = FAMILIES[family]
    model = build(case)
    inputs = case[2](model.config)
    clean = run(model, inputs)
    with safe_rope.guard(tables="fp32") as session:
        guarded = build(case)
    assert not session.report.unprotected
    same = run(guarded, inputs)
    for one, other in zip(clean.calls, same.calls, strict=True):
        assert all(map(torch.equal, one.results, other.results)), "FP32 models keep their bits"
    measured = errors(clean.calls, run(guarded.to(torch.bfloat16), lowered(inputs)).calls)
    assert max(measured.values()) <= HALF, measured
