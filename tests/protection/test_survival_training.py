"""Tables reach every rotation exact and in FP32: under autocast, in generation, with adapters, dispatched."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import families, survival

import safe_rope

pytestmark = pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")

LENGTH = 12


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate")


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def _step(model: Any, dtype: torch.dtype | None) -> float:
    """One training step, under autocast to ``dtype`` unless that is None; return the loss."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = survival.tokens(LENGTH)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_step_under_autocast_rotates_exactly(
    family: str, checkpointing: bool | None, weights: torch.dtype, monkeypatch: Any
) -> None:
    model = survival.build(family).to(weights).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    calls = survival.record_applications(monkeypatch, family)
    _step(model, torch.bfloat16)
    # Two layers; with checkpointing the backward pass runs each of them a second time.
    assert len(calls) == (2 if checkpointing is None else 4)
    survival.assert_applied_exactly(calls, family, range(LENGTH))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.eval()(survival.tokens(LENGTH))
    survival.assert_applied_exactly(calls, family, range(LENGTH))
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_checkpointing_changes_no_gradient(family: str, reentrant: bool) -> None:
    plain, checkpointed = survival.build(family).train(), survival.build(family).train()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    # Not under autocast, where 4.57's own gradients differ.
    assert _step(plain, None) == _step(checkpointed, None)
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_generation_past_the_limit_rotates_exactly(family: str, monkeypatch: Any) -> None:
    model = survival.build(family, max_position_embeddings=16).to(torch.bfloat16)
    calls = survival.record_applications(monkeypatch, family)
    ids = survival.tokens(LENGTH, batch=1)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    assert len(calls) == 2 * 24
    survival.assert_applied_exactly(calls[:2], family, range(LENGTH))
    for step in range(1, 24):
        survival.assert_applied_exactly(calls[2 * step : 2 * step + 2], family, [LENGTH + step - 1])


def _lora(peft: Any, family: str) -> Any:
    targets = ["query_key_value"] if family == "gpt_neox" else ["q_proj", "v_proj"]
    return peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_lora_on_top_trains_and_merges(family: str, peft: Any, monkeypatch: Any) -> None:
    model = survival.build(family).to(torch.bfloat16)
    adapted = peft.get_peft_model(model, _lora(peft, family)).train()
    with monkeypatch.context() as patch:
        calls = survival.record_applications(patch, family)
        _step(adapted, None)
        survival.assert_applied_exactly(calls, family, range(LENGTH))
    survival.assert_right(adapted, family, "exact")
    merged = adapted.merge_and_unload()
    survival.assert_runs(merged)
    survival.assert_right(merged, family, "exact")


def test_lora_inside_a_guard_stays_where_it_is(peft: Any) -> None:
    # Its constructor takes the model, and puts the adapters into it: run again, it would put others there.
    config = transformers.GPTJConfig(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=512, rotary_dim=8, bos_token_id=0
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    outputs = []
    for guarded in (False, True):
        torch.manual_seed(0)
        with safe_rope.guard(tables="fp32") if guarded else contextlib.nullcontext():
            model = peft.get_peft_model(transformers.GPTJForCausalLM(config), lora).eval()
        assert not any(parameter.is_meta for parameter in model.parameters())
        outputs.append(model(input_ids=torch.arange(40)[None]).logits)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_lora_around_a_model_that_is_protected_afterwards(family: str, peft: Any) -> None:
    adapted = peft.get_peft_model(families.build(family).to(torch.bfloat16), _lora(peft, family))
    safe_rope.protect(adapted)
    survival.assert_right(adapted, family, "exact")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_dispatch_model_keeps_tables(family: str, accelerate: Any, monkeypatch: Any) -> None:
    model = accelerate.dispatch_model(survival.build(family).to(torch.bfloat16), device_map={"": "cpu"})
    accelerate.hooks.add_hook_to_module(
        model, accelerate.hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
    )
    calls = survival.record_applications(monkeypatch, family)
    survival.assert_runs(model, LENGTH)
    survival.assert_applied_exactly(calls, family, range(LENGTH))
    survival.assert_right(model, family, "exact")


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_empty_weights_then_a_checkpoint_dispatched(
    family: str, include_buffers: bool, accelerate: Any, tmp_path: Path
) -> None:
    stock = families.build(family, layers=2)
    accelerate.Accelerator().save_model(stock, str(tmp_path))
    with safe_rope.guard(tables="fp32"), accelerate.init_empty_weights(include_buffers=include_buffers):
        model = families.build(family, layers=2)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.tie_weights()
    _materialize_other_buffers(model, stock)
    model = accelerate.load_checkpoint_and_dispatch(model, str(tmp_path), device_map={"": "cpu"})
    assert torch.equal(survival.assert_runs(model.eval()), survival.assert_runs(stock))
    survival.assert_right(model, family, "fp32")


def _materialize_other_buffers(model: Any, stock: Any) -> None:
    # 4.36's GPT-NeoX has masks in buffers, which whoever put them on meta has to make again.
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta and "rotary" not in name:
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent)._buffers[own] = stock.get_buffer(name).clone()
