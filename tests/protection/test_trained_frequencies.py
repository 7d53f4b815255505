"""Frequencies that are trained: rotated in FP32, in a graph where the weight is; no worse than stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from held_model import SOURCE
from support import written_modules

import safe_rope

BUFFER = 'self.register_buffer("inv_freq", inv_freq, persistent=False)'
VECTOR, MATRIX = "nn.Parameter(torch.zeros(8))", "nn.Parameter(torch.eye(8))"
STYLES = {
    "a factor": (VECTOR, "self.inv_freq.float() * self.trained.float().exp()"),
    "a term": (VECTOR, "self.inv_freq.float() + self.trained.float()"),
    "in its dtype": (VECTOR, "self.inv_freq * (1 + self.trained)"),
    "a product": (MATRIX, "self.inv_freq @ self.trained"),
    "a layer": ("nn.Linear(8, 8)", "self.trained(self.inv_freq)"),
}
WAYS = ("eager", "graph")


@pytest.fixture(params=STYLES)
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    trained, use = STYLES[request.param]
    source = SOURCE.replace(BUFFER, f"{BUFFER}\n        self.trained = {trained}")
    source = source.replace("* 0.3\n", "* 0.03\n").replace("* self.inv_freq.float()\n", f"* ({use})\n")
    assert use in source
    (module,) = written_modules.write(tmp_path, monkeypatch, modeling_trained=source)
    return module


def guarded(written: Any) -> Any:
    with safe_rope.guard():
        return written.HeldModel()


def errors(written: Any, model: Any, way: str = "eager") -> list[float]:
    """How far the output and the gradients in the rotary module are from the same weights' in float64."""
    truth = written.HeldModel().double()
    truth.load_state_dict(model.state_dict(), strict=False)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "graph" else model
    values = []
    for one, call in ((truth, truth), (model, run)):
        output = call(written.states(model).to(one.attention.qkv.weight.dtype))
        output.double().pow(2).sum().backward()
        values.append([output.detach(), *[p.grad for p in one.rotary.parameters()]])
    return [float((got.double() - true).norm() / true.norm()) for true, got in zip(*values, strict=True)]


def test_all_but_a_layer_is_applied_in_fp32(written: Any) -> None:
    with safe_rope.guard() as session:
        model = written.HeldModel()
    is_layer = isinstance(model.rotary.trained, torch.nn.Module)
    assert ("applied as stock" if is_layer else "applied in FP32") in str(session.report)


@pytest.mark.parametrize("way", WAYS)
def test_an_fp32_model_and_its_gradients_are_as_without_the_guard(written: Any, way: str) -> None:
    assert max(errors(written, guarded(written), way)) < 1e-5
    assert torch.equal(written.output(guarded(written)), written.output(written.HeldModel()))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_in_fp32_beside_a_bf16_model_rotates_in_fp32(written: Any, way: str) -> None:
    model, stock = guarded(written), written.HeldModel()
    for one in (model, stock):
        one.attention.to(torch.bfloat16)
    got, expected = (errors(written, one, way if one is model else "eager") for one in (model, stock))
    assert all(mine <= 1.05 * theirs for mine, theirs in zip(got, expected, strict=True)), (got, expected)


def test_a_weight_in_bf16_counts_as_its_values_in_fp32_do(written: Any) -> None:
    model, other = guarded(written).to(torch.bfloat16), guarded(written)
    if isinstance(model.rotary.trained, torch.nn.Module):
        pytest.skip("a layer is applied as stock")
    other.load_state_dict(model.state_dict())
    other.attention.to(torch.bfloat16)
    assert other.rotary.trained.dtype == torch.float32
    outputs = [one(written.states(one).to(torch.bfloat16)) for one in (model, other)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.float().pow(2).sum().backward()
    assert model.rotary.trained.dtype == torch.bfloat16
    assert torch.equal(model.rotary.trained.grad, other.rotary.trained.grad.to(torch.bfloat16))


@pytest.mark.filterwarnings("ignore::safe_rope.PrecisionWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_in_bf16_is_no_worse_than_in_the_stock_model(written: Any, way: str) -> None:
    model, stock = guarded(written).to(torch.bfloat16), written.HeldModel().to(torch.bfloat16)
    got, expected = (errors(written, one, way if one is model else "eager") for one in (model, stock))
    assert got[0] <= 1.05 * expected[0], (got, expected)
    assert all(mine <= 2 * theirs for mine, theirs in zip(got, expected, strict=True)), (got, expected)
