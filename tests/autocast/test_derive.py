"""Deriving the safe parameters: every way of using one, and nothing left changed."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from typing import Any

import architectures
import numpy as np
import pytest
import small_modules
import torch
import transformers
from torch import Tensor, nn

import safe_rope
from safe_rope.autocast import derive_safe_parameters
from safe_rope.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", small_modules.MODULES)
def test_exactly_the_parameters_that_are_always_cast_are_safe(kind: Any, dtype: torch.dtype) -> None:
    model = small_modules.build(kind)
    report = derive_safe_parameters(model, small_modules.example(), dtype=dtype)
    assert report.safe == kind.safe, report
    assert [entry.name for entry in report.parameters] == [
        name for name, _ in model.named_parameters(remove_duplicate=False)
    ]


def test_reasons_name_the_operator_the_module_and_what_is_tied() -> None:
    def reasons(kind: type[nn.Module]) -> dict[str, str]:
        report = derive_safe_parameters(small_modules.build(kind), small_modules.example())
        return {entry.name: entry.reason for entry in report.parameters}

    assert "aten.mm in router" in reasons(small_modules.AutocastOff)["router.weight"]
    assert "backward" in reasons(small_modules.CustomBackward)["weight"]
    assert "aten.bernoulli" in reasons(small_modules.DropConnect)["weight"] or "dropout" in str(
        reasons(small_modules.DropConnect)
    )
    assert "tied to other" in reasons(small_modules.Aliased)["one"]
    assert reasons(small_modules.Written)["idle"].startswith("unused")
    assert "writes to it" in reasons(small_modules.Written)["clamped"]
    assert "float16" in reasons(small_modules.OtherCasts)["narrow"] or "_to_copy" in str(
        reasons(small_modules.OtherCasts)
    )


def everything(model: nn.Module) -> list[Any]:
    """All that a trace could change, with tensors as their identity, version and bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            grad = None if value.grad is None else plain(value.grad)
            return (
                id(value),
                value.data_ptr(),
                value.shape,
                value.dtype,
                value.numpy(force=True).tobytes(),
                grad,
            )
        if isinstance(value, dict):
            return id(value), type(value), [(key, plain(entry)) for key, entry in value.items()]
        if isinstance(value, list):
            return id(value), [plain(entry) for entry in value]
        return id(value)

    return [(name, plain(vars(module))) for name, module in model.named_modules()]


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("kind", [*small_modules.MODULES, None])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_and_the_random_state_are_left_as_they_were(kind: Any, training: bool) -> None:
    model = small_modules.build(kind) if kind else architectures.build("gpt2")
    model.train(training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        break
    inputs = {"x": small_modules.example()} if kind else architectures.inputs(model)
    given = {name: value.clone() for name, value in inputs.items()}
    before, randomness = everything(model), random_states()
    derive_safe_parameters(model, **inputs)
    assert everything(model) == before
    assert random_states() == randomness
    assert all(torch.equal(inputs[name], value) for name, value in given.items())


def test_what_the_model_keeps_outside_of_its_tensors_is_real_and_as_it_was() -> None:
    small_modules.distances.cache_clear()
    model, fresh = (small_modules.build(small_modules.Stateful) for _ in range(2))
    derive_safe_parameters(model, small_modules.example())
    seen = [model(small_modules.example()).sum() for _ in range(2)]
    small_modules.distances.cache_clear()
    assert [float(one) for one in seen] == [float(fresh(small_modules.example()).sum()) for _ in range(2)]


class Failing(small_modules.Written):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        if x.sum().item() != 0:
            self.broken = torch.rand(())
        raise RuntimeError("the model's own error")


def test_an_exception_in_the_model_reaches_the_caller_and_leaves_nothing_behind() -> None:
    model = small_modules.build(Failing)
    hooks = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
    before, randomness, hooked = everything(model), random_states(), [len(kind) for kind in hooks]
    with pytest.raises(RuntimeError, match="the model's own error"):
        derive_safe_parameters(model, small_modules.example())
    assert everything(model) == before
    assert random_states() == randomness
    assert [len(kind) for kind in hooks] == hooked
    assert not torch.is_autocast_enabled("cpu")
    assert type(torch.ones(1) + 1) is Tensor


@pytest.mark.parametrize("name", ["llama tied", "gpt2", "mixtral eager"])
def test_a_model_without_weights_gives_the_same_report(name: str) -> None:
    model = architectures.build(name)
    inputs = architectures.inputs(model)
    report = derive_safe_parameters(model, **inputs)
    bare = architectures.build(name).to("meta")
    bare.tie_weights()
    assert derive_safe_parameters(bare, **inputs).parameters == report.parameters


def test_a_model_that_an_engine_has_flattened_gives_the_same_report() -> None:
    model = architectures.build("llama tied")
    report = derive_safe_parameters(model, **architectures.inputs(model))
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    assert derive_safe_parameters(model, **architectures.inputs(model)) == report


@pytest.mark.parametrize("name", ["llama tied", "gpt2", "mixtral eager"])
def test_a_partitioned_model_gives_the_same_report_and_nothing_is_gathered(
    name: str, deepspeed_group: None
) -> None:
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters

    model = architectures.build(name)
    inputs = architectures.inputs(model)
    report = derive_safe_parameters(model, **inputs)
    deepspeed.zero.Init(
        module=model,
        config_dict_or_path={
            "train_batch_size": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    assert derive_safe_parameters(model, **inputs).parameters == report.parameters
    status = partition_parameters.ZeroParamStatus.NOT_AVAILABLE
    assert all(p.numel() == 0 and p.ds_status == status for p in model.parameters())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_inside_an_engine_gives_the_same_report(stage: int, deepspeed_group: None) -> None:
    import deepspeed

    model = architectures.build("llama tied").train()
    inputs = architectures.inputs(model)
    report = derive_safe_parameters(model, **inputs)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    assert derive_safe_parameters(model, **inputs).safe == report.safe
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    loss = engine(**inputs, labels=inputs["input_ids"]).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_what_a_reentrant_checkpoint_computes_again_is_traced(kind: str, deepspeed_group: None) -> None:
    # DeepSpeed's computes again outside of autocast, where weights are read in FP32; torch's does not.
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from torch.utils.checkpoint import checkpoint

    checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=False)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.within, self.last = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            if kind == "torch":
                return self.last(checkpoint(self.within, self.first(x), use_reentrant=True))
            return self.last(checkpointing.checkpoint(self.within, self.first(x).float()))

    def gradients(rounded: Collection[str]) -> list[Tensor]:
        block = Block()
        for name, parameter in block.named_parameters():
            if name in rounded:
                parameter.data = parameter.data.bfloat16().float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = block(x).float().square().sum()
        loss.backward()
        return [parameter.grad for parameter in block.parameters()]

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    block = Block()
    block.first.weight.grad = torch.ones(16, 16)
    report = derive_safe_parameters(block, x)
    assert all(map(torch.equal, gradients(report.safe), gradients(())))
    assert {"first.weight", "last.weight"} <= report.safe
    assert ("within.weight" in report.safe) is (kind == "torch")
    assert not any("backward could not be traced" in note for note in report.warnings)
    assert torch.equal(block.first.weight.grad, torch.ones(16, 16))
    assert block.last.weight.grad is None


def test_what_a_reentrant_checkpoint_reads_of_others_gets_no_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        """Reads a layer and a leaf that are no part of it."""

        def __init__(self) -> None:
            super().__init__()
            self.within, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.others = [nn.Linear(8, 8)]
            self.leaf = torch.ones(8, requires_grad=True)

        def compute(self, x: Tensor) -> Tensor:
            return self.others[0](self.within(x)) * self.leaf

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.compute, self.last(x), use_reentrant=True)

    block, told = Block(), []
    weight, bias = block.others[0].parameters()
    weight.register_post_accumulate_grad_hook(told.append)
    bias.grad = torch.ones(8)
    report = derive_safe_parameters(block, torch.randn(2, 8))
    assert not report.warnings
    assert {"within.weight", "last.weight"} <= report.safe
    assert weight.grad is None
    assert block.leaf.grad is None
    assert torch.equal(bias.grad, torch.ones(8))
    assert not told


def test_a_protected_model_gives_the_same_report_and_keeps_its_tables() -> None:
    config = {**architectures.SIZES, "rope_theta": 12345.0}  # tables that no other test has made
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    inputs = architectures.inputs(model)
    stock = derive_safe_parameters(model, **inputs)
    assert safe_rope.protect(model).protected
    assert derive_safe_parameters(model, **inputs).safe == stock.safe
    assert safe_rope.audit(model).ok
    assert type(model(**inputs).logits) is Tensor
    assert model(**inputs).logits.isfinite().all()


def test_the_callers_autocast_and_grad_mode_do_not_matter() -> None:
    model = architectures.build("gpt2")
    inputs = architectures.inputs(model)
    report = derive_safe_parameters(model, **inputs)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert derive_safe_parameters(model, **inputs) == report
        assert torch.get_autocast_dtype("cpu") == torch.float16
    with torch.inference_mode():
        assert derive_safe_parameters(model, **inputs) == report


def test_dtypes_that_are_not_float32_are_not_called_safe() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).half())
    report = derive_safe_parameters(model, small_modules.example())
    assert report.safe == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert "float16" in report.parameters[-1].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_a_dtype_that_autocast_does_not_know_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 or torch\.float16, got"):
        derive_safe_parameters(nn.Linear(8, 8), small_modules.example(), dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        derive_safe_parameters(nn.Linear(8, 8), small_modules.example(), device_type="cuda")


def test_the_report_is_a_table_and_json() -> None:
    model = architectures.build("llama tied")
    report = derive_safe_parameters(model, **architectures.inputs(model))
    text = str(report)
    assert "model.layers.*.self_attn.q_proj.weight (2)" in text
    assert "may travel in bfloat16" in text
    assert max(map(len, text.splitlines())) < 100
    assert repr(report).startswith("<SafetyReport: ")
    assert len(repr(report)) < 100
    assert report._repr_html_().startswith("<pre>")
    data = json.loads(json.dumps(report.to_dict()))
    assert data["schema"] == "safe_rope.autocast-safety/1"
    assert {entry["name"] for entry in data["parameters"] if entry["safe"]} == report.safe
    total = sum(p.numel() for p in model.parameters())
    safe = sum(p.numel() for n, p in model.named_parameters() if n in report.safe)
    assert data["safe_share"] == pytest.approx(safe / total)
