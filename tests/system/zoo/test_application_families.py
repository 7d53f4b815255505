"""Every family's q and k are rotated in FP32 and rounded once, measured in its own running model in BF16."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from laboratory.zoo.bodies import bodies, body_of
from laboratory.zoo.rotated import Recorder, errors
from small_bodies import BODIES
from small_families import FAMILIES, build, present

import safe_rope

CASES = FAMILIES | BODIES
UNCOVERED = {
    "roformer.RoFormerSelfAttention.apply_rotary_position_embeddings": "its sines are a frozen parameter",
    "qwen2_5_omni.apply_rotary_pos_emb": "of 4.57's diffusion decoder of speech, which takes no small input",
    "modernbert.apply_rotary_unpadded": "flash-attn's kernel, which needs a GPU",
}
HALF = 0.501
"""One rounding is off by half a unit; what it rounds carries FP32's own."""


def run(model: Any, inputs: dict[str, Any]) -> Recorder:
    with Recorder(model) as recorder, torch.no_grad():
        model(**inputs)
    assert recorder.calls, "the model rotates"
    return recorder


def lowered(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: v.to(torch.bfloat16) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for name, v in inputs.items()
    }


def cast(model: Any) -> Any:
    """Return a model cast to BF16 in place, but for weights that transformers loads in FP32."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    weights = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if any(part in name for part in kept)
    }
    model.to(torch.bfloat16)
    for name, values in weights.items():
        model.get_parameter(name).data = values
    return model


@functools.cache
def stock(family: str) -> tuple[dict[str, Any], Recorder]:
    """A family's input, and how its clean FP32 model applies its positions."""
    model = build(CASES[family])
    inputs = CASES[family][2](getattr(model, "config", None))
    return inputs, run(model, inputs)


@pytest.mark.parametrize("family", present(CASES))
def test_a_family_is_rotated_in_fp32_and_rounded_once(family: str) -> None:
    inputs, clean = stock(family)
    with safe_rope.guard(tables="fp32") as session:
        guarded = build(CASES[family])
    assert not session.report.unprotected
    same = run(guarded, inputs)
    for one, other in zip(clean.calls, same.calls, strict=True):
        assert all(map(torch.equal, one.results, other.results)), "FP32 models keep their bits"
    measured = errors(clean.calls, run(cast(guarded), lowered(inputs)).calls)
    assert max(measured.values()) <= HALF, measured


@pytest.mark.slow
def test_every_way_of_applying_positions_is_that_of_a_family() -> None:
    seen = {body_of(f) for family in present(CASES) for f in stock(family)[1].functions}
    release = bodies(Path(transformers.__file__).parent / "models")
    assert len(release) > 5
    left = {body: functions for body, functions in release.items() if body not in seen}
    assert not {body: functions for body, functions in left.items() if not UNCOVERED.keys() & set(functions)}


@pytest.mark.parametrize("family", ["gptj", "dinov3"])
def test_a_model_that_exists_is_protected_in_full_and_so_are_its_copies(family: str) -> None:
    if family not in present(FAMILIES):
        pytest.skip("this release does not have it")
    case = FAMILIES[family]
    model = build(case)
    inputs = case[2](model.config)
    clean = run(model, inputs)
    damaged = build(case).to(torch.bfloat16)
    report = safe_rope.protect(damaged, tables="fp32")
    assert not report.unprotected
    assert report.protected
    for copied in (damaged, copy.deepcopy(damaged), pickle.loads(pickle.dumps(damaged))):
        measured = errors(clean.calls, run(copied, lowered(inputs)).calls)
        assert max(measured.values()) <= HALF, measured


@pytest.mark.parametrize("family", sorted({"wav2vec2_bert", "clvp"} & {*present(CASES)}))
def test_a_graph_of_the_whole_model_rotates_as_it_does_outside_one(family: str) -> None:
    with safe_rope.guard():
        model = build(CASES[family]).to(torch.bfloat16)
    inputs = lowered(CASES[family][2](model.config))
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        compiled = torch.compile(model, backend="aot_eager")(**inputs).last_hidden_state
    assert torch.equal(expected, compiled)


def test_the_authors_way_is_kept_where_it_is_asked_for() -> None:
    case = FAMILIES["gptj"]
    plain, inputs = build(case).to(torch.bfloat16), case[2](None)
    with safe_rope.guard(tables="fp32", apply="stock"):
        guarded = build(case).to(torch.bfloat16)
    pairs = zip(run(plain, inputs).calls, run(guarded, inputs).calls, strict=True)
    assert all(
        torch.equal(a, b) for one, other in pairs for a, b in zip(one.results, other.results, strict=True)
    )


def test_layers_with_the_same_table_share_one_on_the_cpu() -> None:
    with safe_rope.guard():
        model = build(FAMILIES["gptj"])
    if not hasattr(model.h[0].attn, "embed_positions"):
        pytest.skip("from transformers 5.24 on the model has one table for its layers")
    first, second = (layer.attn._safe_rope.pins["embed_positions"].values for layer in model.h)
    assert first is second
    assert model.h[0].attn.embed_positions is not model.h[1].attn.embed_positions
