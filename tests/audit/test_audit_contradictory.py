"""Configs that contradict themselves, and guarded models filled on meta, are judged by what they answer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import safe_rope

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 32,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}
TRAINED = 32
LINEAR = {"rope_type": "linear", "factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 0.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 4.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}


def llama(**rope: Any) -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES)
    if not hasattr(config, "rope_parameters"):
        pytest.skip("this release refuses such values")
    config.rope_parameters = {**config.rope_parameters, **rope}
    return LlamaForCausalLM(config)


def phi(**rope: Any) -> Any:
    if not hasattr(transformers, "Phi3Config"):
        pytest.skip("this release has no Phi-3")
    said = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [4.0 + i for i in range(16)],
        "original_max_position_embeddings": TRAINED,
    }
    try:
        config = transformers.Phi3Config(
            **SIZES, rope_parameters=said, original_max_position_embeddings=TRAINED
        )
    except (TypeError, ValueError, KeyError):
        pytest.skip("this release has its rope elsewhere")
    if not hasattr(config, "rope_parameters") or config.rope_parameters != said:
        pytest.skip("this release has its rope elsewhere")
    config.rope_parameters.update(rope)
    return transformers.Phi3ForCausalLM(config)


BUILT: dict[str, Any] = {
    "dynamic": lambda: llama(**DYNAMIC),
    "longrope": lambda: phi(attention_factor=-1.0),
    "a longrope factor": lambda: phi(factor=0.5),
}


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("name", BUILT)
def test_what_it_keeps_is_right_after_a_long_sequence(name: str, how: str) -> None:
    with safe_rope.guard() if how == "guard" else contextlib.nullcontext():
        model = BUILT[name]()
    if how == "protect":
        safe_rope.protect(model)
    stock = BUILT[name]().eval()
    stock.load_state_dict(model.state_dict())
    for length in (8, 400, 8):
        tokens = torch.arange(length)[None] % 30
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(tokens).logits, stock(tokens).logits)
        assert safe_rope.audit(model).ok, f"{length}: {safe_rope.audit(model)}"


@pytest.mark.parametrize("change", [LINEAR, DYNAMIC, LLAMA3], ids=lambda one: str(one["rope_type"]))
def test_a_right_model_whose_config_contradicts_itself_later_is_unknown(change: dict[str, Any]) -> None:
    model = llama()
    model.config.rope_parameters = {**model.config.rope_parameters, **change}
    report = safe_rope.audit(model)
    assert {one.verdict for one in report.modules} == {"unknown"}, str(report)


@pytest.mark.parametrize("damage", ["cast", "widened", "zeros", "nan"])
def test_a_damaged_model_whose_config_contradicts_itself_later_is_damaged(damage: str) -> None:
    model = llama()
    model.config.rope_parameters = {**model.config.rope_parameters, **LINEAR}
    inv_freq = model.model.rotary_emb.inv_freq
    if damage == "zeros":
        inv_freq.zero_()
    elif damage == "nan":
        inv_freq.fill_(torch.nan)
    else:
        low = inv_freq.bfloat16()
        model.model.rotary_emb.inv_freq = low if damage == "cast" else low.float()
    report = safe_rope.audit(model)
    assert {one.verdict for one in report.modules} == {"damaged"}, str(report)


def test_a_guarded_model_that_is_filled_on_meta_by_assignment_is_ok() -> None:
    stock = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with safe_rope.guard(), torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.load_state_dict(stock.state_dict(), strict=False, assign=True)
    rotary: Any = next(module for module in model.modules() if "Rotary" in type(module).__name__)
    if not rotary.inv_freq.is_meta or hasattr(rotary, "cos_cached"):
        pytest.skip("this release fills it, or shows tables that are on meta")
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, stock(tokens).logits)
    assert safe_rope.audit(model).ok, str(safe_rope.audit(model))


@pytest.mark.parametrize("length", [0, 512])
def test_the_audit_leaves_a_config_as_it_is_where_a_forward_writes_to_it(length: int) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 1024,
    }
    config = transformers.Phi3Config(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=32,
        vocab_size=64,
        pad_token_id=0,
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_scaling=rope,
    )
    if not isinstance(getattr(config, "rope_parameters", None), dict):
        pytest.skip("this release keeps it elsewhere")
    model = transformers.Phi3Model(config)
    model.config.rope_parameters["original_max_position_embeddings"] = length
    report = safe_rope.audit(model)
    assert report.verdict != "damaged", str(report)
    assert model.config.rope_parameters["original_max_position_embeddings"] == length
