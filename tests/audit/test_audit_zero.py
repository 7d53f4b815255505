"""audit() on what the real DeepSpeed makes of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotary_models import build, rotary_modules
from support.zero_init import zero_init

import safe_rope

pytestmark = [pytest.mark.usefixtures("deepspeed_group"), pytest.mark.contract]


def _stock_is_intercepted() -> bool:
    """Whether the installed Llama makes its tables with constructors that zero.Init rounds."""
    from rotary_models import first_rotary

    plain = first_rotary(build(layers=1))  # the first: what it imports cannot be imported under zero.Init
    with zero_init():
        model = build(layers=1)
    rotary = first_rotary(model)
    tables = [getattr(rotary, name) for name in ("inv_freq", "cos_cached") if hasattr(rotary, name)]
    return any(
        not torch.equal(table.float(), getattr(plain, name))
        for name, table in zip(("inv_freq", "cos_cached"), tables, strict=False)
    )


def test_direct_zero_init_damage_is_found_with_its_source() -> None:
    intercepted = _stock_is_intercepted()
    with zero_init():
        model = build()
    report = safe_rope.audit(model)
    damaged = {f.what: f for f in report.damaged}
    print(report)
    assert bool(damaged) == intercepted
    if "cos_cached, sin_cached" in damaged:
        cache = damaged["cos_cached, sin_cached"]
        assert "positions rounded to bfloat16" in cache.source
        assert cache.first_bad_position == 257
        assert cache.cos_error > 1.9
    elif damaged:
        assert "computed in" in damaged["inv_freq"].source
        assert damaged["inv_freq"].phase_error_rad > 5


def test_guarded_direct_zero_init_is_ok() -> None:
    with safe_rope.guard(), zero_init():
        model = build()
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert all(m.protected and m.worst.phase_error_rad <= 2**-23 for m in report.modules)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("guarded", [False, True], ids=["stock", "guarded"])
def test_an_engine_is_audited(stage: int, guarded: bool) -> None:
    import contextlib

    import deepspeed

    config: dict[str, Any] = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    with safe_rope.guard() if guarded else contextlib.nullcontext():
        model = build(layers=1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.arange(8)[None]
    before = engine(input_ids=ids).logits
    report = safe_rope.audit(engine)
    print(report)
    assert len(report.modules) == len(rotary_modules(engine)) >= 1
    assert report.modules[0].rows, "forward could be measured"
    if guarded:
        assert report.ok, str(report)
    else:
        cast = {b.dtype for b in next(iter(rotary_modules(engine).values())).buffers()} != {torch.float32}
        assert bool(report.damaged) == cast
    assert torch.equal(engine(input_ids=ids).logits, before)
