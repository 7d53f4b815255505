"""audit() on models that something is wrapped around: FSDP in both forms, PEFT, DDP, engines, a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rotary_models import build, first_rotary, rotary_modules
from support import small_models, two_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")

IDS = torch.arange(8)[None]


def made(guarded: bool) -> nn.Module:
    model = build(layers=1)
    if guarded:
        safe_rope.protect(model)
    return model


def fsdp(model: nn.Module, buffer_dtype: torch.dtype | None, own: bool = True) -> nn.Module:
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=buffer_dtype)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, mixed_precision=precision, device_id=cpu, use_orig_params=own)


def fully_sharded(model: nn.Module, rotary_too: bool) -> nn.Module:
    composable = pytest.importorskip("torch.distributed.fsdp")
    precision = composable.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if rotary_too:
        for rotary in rotary_modules(model).values():
            composable.fully_shard(rotary)
    composable.fully_shard(model, mp_policy=precision)
    return model


@pytest.mark.parametrize("guarded", [False, True], ids=["stock", "guarded"])
def test_fsdp_that_casts_buffers_is_found_before_it_does_it(guarded: bool) -> None:
    model = fsdp(made(guarded), torch.bfloat16)
    before = safe_rope.audit(model)
    assert first_rotary(model).inv_freq.dtype == torch.float32, "nothing has been cast yet"
    model(input_ids=IDS, use_cache=False)
    after = safe_rope.audit(model)
    assert before.ok == after.ok == guarded, f"{before}\n{after}"
    assert before.model_class.endswith("LlamaForCausalLM")
    assert [name.rpartition(".")[2] for name in before.wrappers] == ["FullyShardedDataParallel"]
    if guarded:
        return
    found = next(f for f in before.damaged if f.what == "inv_freq")
    assert "FSDP does that at the first forward" in found.source
    assert found.where == "module cast"
    worst = [report.modules[0].worst for report in (before, after)]
    assert worst[0] == worst[1], "what was foretold is what came"
    assert worst[0].phase_error_rad > 0.5


def test_views_of_a_flat_parameter_end_no_audit() -> None:
    assert safe_rope.audit(fsdp(made(guarded=False), torch.bfloat16, own=False)).verdict == "damaged"
    assert safe_rope.audit(fsdp(made(guarded=False), None, own=False)).ok


def test_views_of_a_flat_parameter_without_memory_end_no_audit() -> None:
    model = fsdp(made(guarded=False), torch.bfloat16, own=False)
    model(input_ids=IDS, use_cache=False)
    view = model.module.model.layers[0].mlp.up_proj.weight
    assert view.untyped_storage().nbytes() == 0, "FSDP has given it back"
    assert safe_rope.audit(model).verdict == "damaged"


@pytest.mark.parametrize("own", [True, False], ids=["own parameters", "flat"])
def test_what_fsdp_will_cast_beside_weights_is_found_before_it_does_it(own: bool) -> None:
    model = fsdp(small_models.build("gptj"), torch.bfloat16, own)
    before = safe_rope.audit(model)
    model(IDS)
    after = safe_rope.audit(model)
    assert before.verdict == after.verdict == "damaged", f"{before}\n{after}"
    errors = [[found.cos_error for found in report.damaged] for report in (before, after)]
    assert errors[0] == errors[1], "what was foretold is what came"


def test_fsdp_that_leaves_buffers_alone_is_ok() -> None:
    model = fsdp(made(guarded=False), None)
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    (note, *_) = report.findings
    assert note.where == "application", "the parameters are float32, the activations are not"
    model(input_ids=IDS, use_cache=False)
    assert safe_rope.audit(model).ok


@pytest.mark.parametrize("rotary_too", [False, True])
@pytest.mark.parametrize("guarded", [False, True], ids=["stock", "guarded"])
def test_fully_sharded_modules_are_audited(guarded: bool, rotary_too: bool) -> None:
    model = fully_sharded(made(guarded), rotary_too)
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert len(report.modules) == len(rotary_modules(model)) == 1
    assert report.model_class.endswith("LlamaForCausalLM")
    assert report.modules[0].module_class.endswith("modeling_llama.LlamaRotaryEmbedding")
    assert report.modules[0].protected == guarded
    assert len(report.modules[0].rows) == 10
    for rotary in rotary_modules(model).values():
        if not guarded:
            rotary.inv_freq = rotary.inv_freq.bfloat16()
            assert not safe_rope.audit(model).ok


@pytest.mark.parametrize("guarded", [False, True], ids=["stock", "guarded"])
def test_a_peft_model_in_an_engine_is_audited(guarded: bool) -> None:
    peft = pytest.importorskip("peft")
    import deepspeed

    model = peft.get_peft_model(made(guarded).bfloat16(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    config: dict[str, Any] = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    report = safe_rope.audit(engine)
    assert [name.rpartition(".")[2] for name in report.wrappers] == [
        "DeepSpeedEngine",
        "PeftModel",
    ]
    assert report.model_class.endswith("LlamaForCausalLM")
    assert engine.get_submodule(report.modules[0].path) is first_rotary(engine)
    assert report.ok == guarded, str(report)
    if not guarded:
        with pytest.raises(safe_rope.DamagedTablesError, match=r"inv_freq.*bfloat16 \(module cast\)"):
            report.raise_if_damaged()


def test_a_compiled_distributed_model_is_audited() -> None:
    model = torch.compile(nn.parallel.DistributedDataParallel(made(guarded=False)))
    report = safe_rope.audit(model)
    assert [name.rpartition(".")[2] for name in report.wrappers] == [
        "OptimizedModule",
        "DistributedDataParallel",
    ]
    assert report.model_class.endswith("LlamaForCausalLM")
    assert report.ok, str(report)
    assert len(report.modules) == 1


@pytest.mark.slow
@pytest.mark.timeout(430)
def test_each_of_two_ranks_audits_its_shards(tmp_path: Path) -> None:
    for seen in two_ranks.run("audit/sharded_worker.py", [], tmp_path, 400):
        assert seen["share"] < 1.0, "the parameters really are sharded"
        assert seen["ok"] == {"fsdp stock": False, "fsdp guarded": True, "fully_shard stock": True}
