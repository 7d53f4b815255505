"""guard, zero.Init and torch_autocast together: position tables stay exact, the rotation is FP32."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from support import families, survival

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")

LENGTH = 12


def ds_config(dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "torch_autocast": {"enabled": True, "dtype": dtype},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tables_stay_exact_and_the_rotation_fp32_under_zero_init_and_autocast(
    family: str, dtype: str, monkeypatch: Any, has_autocast: bool
) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    import deepspeed

    config = ds_config(dtype)
    families.model_class(family)  # torch._dynamo, which this imports, cannot be imported inside zero.Init
    with safe_rope.guard() as session, deepspeed.zero.Init(config_dict_or_path=config):
        model = families.build(family, layers=2).train()
    assert session.report.protected
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = safe_rope.initialize(model=model, optimizer=optimizer, config=config)
    calls = survival.record_applications(monkeypatch, family)
    ids = survival.tokens(LENGTH)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    assert len(calls) == 4  # two layers, two steps
    assert calls[0][0].dtype in (torch.float32, getattr(torch, dtype))  # q, as autocast left it
    survival.assert_applied_exactly(calls, family, range(LENGTH))
    survival.assert_right(model, family, "exact")
    safe_rope.audit(model).raise_if_damaged()
    engine.destroy()


@pytest.mark.parametrize("guarded", [True, False])
def test_adapters_on_a_low_base_train_and_a_guard_keeps_the_tables_exact(
    guarded: bool, has_autocast: bool
) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    import deepspeed
    import peft

    config = ds_config("bfloat16") | {"bf16": {"enabled": True}}
    families.model_class("llama")
    with contextlib.ExitStack() as stack:
        if guarded:
            stack.enter_context(safe_rope.guard())
        stack.enter_context(deepspeed.zero.Init(config_dict_or_path=config))
        model = families.build("llama", layers=2).train()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    trained = [p for p in adapted.parameters() if p.requires_grad]
    engine, *_ = safe_rope.initialize(
        model=adapted, optimizer=torch.optim.SGD(trained, lr=0.01), config=config
    )
    ids = survival.tokens(LENGTH)
    losses = []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {torch.bfloat16}
    if guarded:
        report, of_copy = safe_rope.audit(model), safe_rope.audit(copy.deepcopy(model))
        report.raise_if_damaged()
        assert [one.path for one in of_copy.modules] == [one.path for one in report.modules]
        survival.assert_right(model, "llama", "exact")
    engine.destroy()
