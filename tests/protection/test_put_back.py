"""What is written to a table after something else was: the values that it held before are there, as in stock.

transformers 5.2 to 5.18 initialises HunYuan by the formula's frequencies, and writes its own over them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from no_harm import Holder, Rope
from support import families
from torch import Tensor

import safe_rope

pytestmark = pytest.mark.contract


def llama(kind: str | None) -> Any:
    if kind is None:
        return families.build("llama")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if not hasattr(families.config("llama"), "rope_parameters"):
        scaling["type"] = scaling.pop("rope_type")
    return families.build("llama", rope_scaling=scaling)


BUILDS: dict[str, Callable[[], Any]] = {
    "default": lambda: llama(None),
    "dynamic": lambda: llama("dynamic"),
    "own": lambda: Holder(Rope()),
}


def rotary(model: Any) -> Any:
    return model.rope if isinstance(model, Holder) else next(iter(families.rotary_modules(model).values()))


def write(model: Any, values: Tensor, *, is_last: bool = False) -> None:
    module = rotary(model)
    with torch.no_grad():
        module.inv_freq.copy_(values)
    assert is_last or torch.equal(module.inv_freq, values)  # which to read is to judge


@pytest.mark.parametrize("last", [1.0, 0.25])
@pytest.mark.parametrize("when", ["inside", "outside", "of a copy"])
@pytest.mark.parametrize("build", BUILDS)
def test_the_last_values_count(build: str, when: str, last: float) -> None:
    with safe_rope.guard():
        model = BUILDS[build]()
        own = rotary(model).inv_freq.clone()
        if when == "inside":
            write(model, own * 0.5)
            write(model, own * last, is_last=True)
    if when == "of a copy":
        write(model, own * 0.5)
        model, other = copy.deepcopy(model), model
        write(other, own * 0.125)
    if when != "inside":
        write(model, own * 0.5)
        write(model, own * last, is_last=True)
    model.to(torch.bfloat16)
    assert torch.allclose(rotary(model).inv_freq.float(), own * last, rtol=1e-6)


def test_positions_are_of_the_last_values() -> None:
    truth = llama("dynamic")
    with safe_rope.guard():
        model = llama("dynamic")
        own = rotary(model).inv_freq.clone()
        write(model, own * 0.5)
        write(model, own, is_last=True)
    for got, true in zip(
        families.read_tables(rotary(model)), families.read_tables(rotary(truth)), strict=True
    ):
        assert torch.allclose(got, true, atol=1e-3)


def asked(module: Any, length: int) -> Tensor:
    got = families.read_tables(module, (0, 1, length - 1))
    return torch.cat((got.cos, got.sin))


@pytest.mark.parametrize("late", [False, True])
def test_what_is_written_after_a_return_is_what_dynamic_ntk_returns_to(late: bool) -> None:
    """The stock module registers one tensor under two names: its next return is to what was written."""
    truth = llama("dynamic")
    with contextlib.nullcontext() if late else safe_rope.guard():
        model = llama("dynamic")
    if late:
        safe_rope.protect(model)
    if not hasattr(rotary(truth), "original_inv_freq"):
        pytest.skip("transformers before 4.43 does not return")
    lengths = (5000, 60, 5000, 60)
    for factor in (0.5, 0.25):  # the first write leaves the forward to the stock class
        for one in (truth, model):
            for length in lengths[:2]:
                asked(rotary(one), length)
            write(one, rotary(one).inv_freq * factor, is_last=True)
        for length in lengths:
            assert torch.allclose(asked(rotary(model), length), asked(rotary(truth), length), atol=2e-3)
