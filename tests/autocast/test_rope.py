"""guard, zero.Init and torch_autocast together: position tables stay exact, the rotation is FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import families, survival

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")

LENGTH = 12


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tables_stay_exact_and_the_rotation_fp32_under_zero_init_and_autocast(
    family: str, dtype: str, monkeypatch: Any, has_autocast: bool
) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "torch_autocast": {"enabled": True, "dtype": dtype},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
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
