"""safe_rope.initialize on one rank: deepspeed.initialize's arguments and results, and autocast around it."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope.autocast import _deepspeed, releases
from safe_rope.errors import ConfigError, PrecisionWarning

pytestmark = [pytest.mark.usefixtures("deepspeed_group"), pytest.mark.contract]


class Regression(nn.Module):
    """Two linear layers; the forward returns the loss and says under which autocast it ran."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        self.seen = out.dtype
        return out.float().square().mean()


def config(stage: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **changes,
    }


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
BATCH = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


def step(engine: Any) -> float:
    loss = engine(BATCH)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_without_the_section_the_engine_is_deepspeeds(stage: int) -> None:
    import deepspeed

    losses = []
    for initialize in (safe_rope.initialize, deepspeed.initialize):
        engine, optimizer, loader, scheduler = initialize(model=Regression(), config=config(stage))
        assert optimizer is engine.optimizer
        assert loader is None
        assert scheduler is None
        losses.append([step(engine), step(engine)])
        assert engine.module.seen == torch.float32
    assert losses[0] == losses[1]


class Branches(nn.Module):
    """A module without parameters of its own, that uses its input twice; frozen in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.one(x) + self.two(x)


class Adapted(nn.Module):
    """An FP32 layer whose output, in bfloat16, is used within such a module and beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branches, self.third = nn.Linear(64, 64), Branches(), nn.Linear(64, 64)
        for part in (self.branches, self.third):
            part.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.branches(x))
        return (self.branches(x) + self.third(x)).float().square().mean()


def test_zero_3_adds_the_gradients_of_an_activation_as_the_model_without_it_does(has_autocast: bool) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    own = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    asked = config(3, **AUTOCAST)
    asked["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    plain, held = Adapted(), []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = plain(own)
        loss.backward()
    for initialize in (deepspeed.initialize, safe_rope.initialize):
        given = own.clone().requires_grad_()
        with _deepspeed.own_globals():
            engine, *_ = initialize(model=Adapted(), config=asked)
            for _ in range(2):
                engine.backward(engine(given))
        held.append([n for n, p in engine.module.named_parameters() if p.ds_status.name == "AVAILABLE"])
    for name, parameter in engine.module.first.named_parameters():
        assert torch.equal(safe_get_full_grad(parameter), getattr(plain.first, name).grad), name
    assert not given._backward_hooks
    assert held[0] == held[1]


@pytest.mark.parametrize("first", [{}, AUTOCAST], ids=["plain", "autocast"])
def test_an_engine_trains_on_where_the_next_one_of_its_model_fails_to_be_built(
    first: dict[str, Any], has_autocast: bool
) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")

    def losses(fails: bool) -> list[float]:
        engine, *_ = safe_rope.initialize(model=Regression(), config=config(3, **first))
        before = step(engine)
        if fails:
            wrong = config(3, **AUTOCAST, optimizer={"type": "NoSuchOptimizer", "params": {"lr": 0.1}})
            with pytest.raises(Exception, match="NoSuchOptimizer"):
                safe_rope.initialize(model=engine.module, config=wrong)
        return [before, step(engine), step(engine)]

    assert losses(fails=True) == losses(fails=False)


@pytest.mark.usefixtures("autocast_engine")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_alone_has_its_weights_as_they_are_after_a_step(stage: int) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    engine, *_ = safe_rope.initialize(model=Regression(), config=config(stage, **AUTOCAST))
    step(engine)
    model = engine.module
    masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    exported = model.state_dict()
    assert masters
    assert all(torch.equal(exported[name], masters[name]) for name in masters)


class OwnParameters(Regression):
    """A model whose `parameters` is its own, and takes no arguments."""

    def parameters(self) -> Any:  # type: ignore[override]
        return (p for p in super().parameters() if p.requires_grad)


class OwnNames(Regression):
    """A model that keeps its layers in a list, and names their parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [vars(self)["_modules"].pop("layers")]

    @property
    def layers(self) -> nn.Module:
        return self.kept[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.kept[0].named_parameters(*args, **kwargs)


@pytest.mark.usefixtures("autocast_engine")
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("model", [OwnParameters, OwnNames])
def test_a_model_may_list_its_parameters_itself(model: type[Regression], stage: int) -> None:
    losses = []
    for kind in (model, Regression):
        asked = config(stage, **AUTOCAST)
        engine, *_ = safe_rope.initialize(model=kind(), config=asked, example_inputs=BATCH)
        losses.append([step(engine), step(engine)])
    assert losses[0] == losses[1]


class Heads(nn.Module):
    """Two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        return self.heads[which](self.trunk(x)).float().square().mean()


@pytest.mark.parametrize(
    ("accumulation", "stage", "offload"),
    # DeepSpeed offloads what the last micro-batch uses, and no other gradient.
    [(1, 2, "none"), (2, 2, "none"), (1, 3, "none"), (2, 3, "none"), (1, 3, "cpu")],
)
def test_a_parameter_that_a_step_does_not_use_stays_where_it_is(
    accumulation: int, stage: int, offload: str, has_autocast: bool
) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    if not has_autocast or releases.faults(_deepspeed.release(), stage, accumulation):
        pytest.skip("this DeepSpeed has no torch_autocast that accumulates")
    asked = config(stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.0, **AUTOCAST)
    asked["zero_optimization"]["offload_optimizer"] = {"device": offload}
    engine, *_ = safe_rope.initialize(model=Heads(), config=asked)
    plain = Heads()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    # The second head is used in some steps, and in the last micro-batch of one.
    for uses in ([1] * accumulation, [0] * accumulation, [0] * (accumulation - 1) + [1], [0] * accumulation):
        for which in uses:
            engine.backward(engine(BATCH, which=which))
            engine.step()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = plain(BATCH, which=which) / accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
        torch.testing.assert_close(trained, list(plain.parameters()), atol=1e-3, rtol=0)


@pytest.mark.parametrize("stage", [0, 2])
def test_autocast_around_an_engine_without_it_is_warned_about_once(stage: int) -> None:
    engine, *_ = safe_rope.initialize(model=Regression(), config=config(stage))
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        engine(BATCH)
    engine.module.seen = None
    # Nothing scales the loss of an engine in FP32.
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ConfigError, match="enabled for cpu around"),
    ):
        engine(BATCH)
    assert engine.module.seen is None
    step(engine)
    assert engine.module.seen == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(PrecisionWarning, match="enabled for cpu around"):
            step(engine)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrecisionWarning)
            step(engine)
    # DeepSpeed 0.17.4 refuses CUDA's autocast around such an engine and switches off any other.
    switched_off = hasattr(_deepspeed.deepspeed().runtime.engine, "validate_nested_autocast")
    assert engine.module.seen == (torch.float32 if switched_off else torch.bfloat16)


@pytest.mark.usefixtures("autocast_engine")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_beside_bf16_the_engine_takes_parameters_as_they_are(stage: int) -> None:
    asked = config(stage, **AUTOCAST, bf16={"enabled": True})
    model = Regression()
    model.layers[0].to(torch.bfloat16).requires_grad_(False)
    engine, *_ = safe_rope.initialize(model=model, example_inputs=BATCH, config=asked)
    dtypes = [p.dtype for p in engine.module.parameters()]
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2
    losses = [step(engine) for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.usefixtures("autocast_engine")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_of_trained_parameters_in_two_dtypes_all_become_fp32(stage: int) -> None:
    model = Regression()
    model.layers[2].to(torch.bfloat16)
    engine, *_ = safe_rope.initialize(model=model, example_inputs=BATCH, config=config(stage, **AUTOCAST))
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    losses = [step(engine) for _ in range(3)]
    assert losses[2] < losses[0]


def test_the_config_may_come_in_args_and_data_gets_a_loader(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()), encoding="utf-8")
    args = argparse.Namespace(local_rank=0, deepspeed_config=str(path))
    engine, _, loader, _ = safe_rope.initialize(args=args, model=Regression(), training_data=list(BATCH))
    assert len(next(iter(loader))) == 2
    assert engine.train_micro_batch_size_per_gpu() == 2


@pytest.fixture
def autocast_engine(has_autocast: bool) -> None:
    if not has_autocast:
        pytest.skip("this DeepSpeed has no torch_autocast")
    if releases.faults(_deepspeed.release(), 2, 1):
        pytest.skip("this DeepSpeed cannot train with torch_autocast at ZeRO 1 and 2")


@pytest.mark.usefixtures("autocast_engine")
@pytest.mark.parametrize("form", ["dict", "args"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_the_section_the_forward_runs_under_autocast(form: str, stage: int, tmp_path: Path) -> None:
    given = config(stage, **AUTOCAST)
    kept = json.dumps(given)
    path = tmp_path / "ds.json"
    path.write_text(kept, encoding="utf-8")
    args = argparse.Namespace(local_rank=0, deepspeed_config=str(path))
    arguments: dict[str, Any] = {"config": given} if form == "dict" else {"args": args}
    engine, *_ = safe_rope.initialize(model=Regression(), example_inputs=BATCH, **arguments)
    losses = [step(engine) for _ in range(3)]
    assert losses[2] < losses[0]
    assert engine.module.seen == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())
    assert json.dumps(given) == kept
    assert args.deepspeed_config == str(path)


@pytest.mark.usefixtures("autocast_engine")
def test_autocast_around_an_engine_that_has_it_is_replaced_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, *_ = safe_rope.initialize(model=Regression(), example_inputs=BATCH, config=config(2, **AUTOCAST))
    with caplog.at_level(logging.INFO, "safe_rope"):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                step(engine)
    assert engine.module.seen == torch.bfloat16
    said = [record for record in caplog.records if "around the engine" in record.message]
    assert len(said) == 1


@pytest.mark.usefixtures("autocast_engine")
def test_engines_with_different_settings_do_not_see_each_other() -> None:
    from deepspeed.runtime import torch_autocast

    before = torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE
    alone = [step(safe_rope.initialize(model=Regression(), config=config(2))[0]) for _ in range(1)]
    model = Regression()
    sections: list[dict[str, Any]] = [
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        AUTOCAST,
        {},
    ]
    engines = [
        safe_rope.initialize(model=m, example_inputs=BATCH, config=config(2, **changes))[0]
        for m, changes in zip((Regression(), Regression(), model), sections, strict=True)
    ]
    after = torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE
    assert after == before
    for _ in range(2):  # interleaved
        for engine, dtype in zip(engines, (torch.float16, torch.bfloat16, torch.float32), strict=True):
            with contextlib.suppress(StopIteration):
                loss = step(engine)
            assert engine.module.seen == dtype
            assert engine.get_global_grad_norm() < 10
            assert loss < 1
    first = safe_rope.initialize(model=Regression(), config=config(2))[0]
    assert [step(first)] == alone


@pytest.mark.usefixtures("autocast_engine")
def test_a_model_that_had_autocast_can_go_without_it() -> None:
    model = Regression()
    safe_rope.initialize(model=model, example_inputs=BATCH, config=config(3, **AUTOCAST))
    name = _deepspeed.mark_name()
    assert any(hasattr(p, name) for p in model.parameters())
    again = Regression()
    again.load_state_dict(Regression().state_dict())
    _deepspeed.mark(again.parameters(), torch.bfloat16)
    engine, *_ = safe_rope.initialize(model=again, config=config(2))
    assert not any(hasattr(p, name) for p in again.parameters())
    step(engine)


def test_a_refusal_leaves_the_model_as_it_was(has_autocast: bool) -> None:
    model = Regression()
    before = {name: dict(vars(p)) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError):
        safe_rope.initialize(model=model, config=config(2, torch_autocast={"enabled": True, "dtype": "int8"}))
    assert {name: dict(vars(p)) for name, p in model.named_parameters()} == before
