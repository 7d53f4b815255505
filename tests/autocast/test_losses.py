"""Losses that read weights outside of the model's forward, where weights are gathered in low precision.

The truth is DDP with torch.autocast. A rank alone gathers nothing; what it would gather is asked for there.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import two_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import safe_rope
from safe_rope.autocast import _deepspeed, releases
from safe_rope.errors import PrecisionWarning

IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Gives logits; keeps what is within, as experts keep their loss."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 32)
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.reentrant is None:
            y = self.first(x)
        else:
            y = checkpoint(self.first, x, use_reentrant=self.reentrant)
        self.kept = self.norm(x + y)
        return self.head(self.kept)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), IDS.flatten())


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def new_engine(model: nn.Module, stage: int = 2, initialize: Any = safe_rope.initialize) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = {"example_inputs": (IDS,)} if initialize is safe_rope.initialize else {}
    return initialize(model=model, optimizer=optimizer, config=config, **ours)[0]


def twice(engine: Any) -> torch.Tensor:
    return loss_of(engine(IDS)) + loss_of(engine(IDS.flip(1)))


def head_under_autocast(engine: Any) -> torch.Tensor:
    engine(IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head = engine.module.head
        return loss_of(nn.functional.linear(engine.module.kept, head.weight, head.bias))


def without_engine(engine: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(engine.module(IDS))


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "a loss of the logits": (Net, lambda engine: loss_of(engine(IDS))),
    "two forwards": (Net, twice),
    "what the forward keeps": (Net, lambda e: loss_of(e(IDS)) + e.module.kept.float().square().mean()),
    "reentrant checkpoint": (functools.partial(Net, True), lambda e: loss_of(e(IDS)) + e.module.kept.mean()),
    "checkpoint": (functools.partial(Net, False), lambda e: loss_of(e(IDS)) + e.module.kept.mean()),
    "head under autocast": (Net, head_under_autocast),
    "without the engine": (Net, without_engine),
    "a weight that is not safe": (Net, lambda e: loss_of(e(IDS)) + e.module.norm.weight.square().sum()),
}
READING: dict[str, Callable[[Any], torch.Tensor]] = {
    "after the forward": lambda e: loss_of(e(IDS)) + penalty(e.module),
    "before the forward": lambda e: penalty(e.module) + loss_of(e(IDS)),
    "in another dtype": lambda e: loss_of(e(IDS)) + e.module.first.weight.double().norm().float(),
    "by its transpose": lambda e: loss_of(e(IDS)) + (e.module.first.weight.t() - 1).square().sum(),
    "a head of its own": lambda e: loss_of((e(IDS), e.module.kept)[1].float() @ e.module.head.weight.t()),
}


def gathered_low(engine: Any, loss: Callable[[Any], torch.Tensor]) -> bool:
    """Whether weights may be low after two steps with this loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        for _ in range(2):
            engine.backward(loss(engine))
            engine.step()
    return bool(engine.low_precision_gather.safe)


@pytest.fixture
def autocast_engines(deepspeed_group: None, has_autocast: bool) -> None:
    if not has_autocast or releases.faults(_deepspeed.release(), 2, 1):
        pytest.skip("this DeepSpeed has no torch_autocast at ZeRO 2")


@pytest.mark.contract
@pytest.mark.usefixtures("autocast_engines")
@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_reads_no_weight_leaves_the_gather_low(name: str) -> None:
    build, loss = RIGHT[name]
    assert gathered_low(new_engine(build()), loss)


@pytest.mark.contract
@pytest.mark.usefixtures("autocast_engines")
@pytest.mark.parametrize("name", READING)
def test_a_loss_that_reads_weights_from_the_first_step_on_keeps_the_gather_in_fp32(name: str) -> None:
    assert not gathered_low(new_engine(Net()), READING[name])


@pytest.mark.usefixtures("autocast_engines")
def test_a_compiled_model_is_gathered_low() -> None:
    model = Net()
    model.compile(backend="aot_eager")
    assert gathered_low(new_engine(model), lambda engine: loss_of(engine(IDS)))


@pytest.mark.contract
@pytest.mark.usefixtures("autocast_engines")
@pytest.mark.parametrize("how", ["scripted", "traced", "compiled"])
def test_a_part_of_torch_script_trains_and_keeps_exact_weights(how: str) -> None:
    """It takes no hooks that refuse a call of it alone; what is compiled does."""

    def losses(initialize: Any) -> tuple[list[float], Any]:
        model: Any = Net()
        x = torch.ones(2, 16)
        model.first = {
            "scripted": torch.jit.script,
            "traced": lambda part: torch.jit.trace(part, x),
            "compiled": lambda part: torch.compile(part, backend="eager"),
        }[how](model.first)
        engine = new_engine(model, initialize=initialize)
        seen = []
        for _ in range(3):
            loss = loss_of(engine(IDS))
            engine.backward(loss)
            engine.step()
            seen.append(float(loss.detach()))
        return seen, engine

    truth, _ = losses(_deepspeed.stock_initialize())
    seen, engine = losses(safe_rope.initialize)
    assert seen == truth
    held = engine.low_precision_gather.safe
    assert id(engine.module.head.weight) in held
    assert (id(next(engine.module.first.parameters())) in held) is (how == "compiled")


@pytest.mark.usefixtures("autocast_engines")
def test_a_compiled_penalty_keeps_the_gather_in_fp32() -> None:
    compiled = torch.compile(penalty, backend="aot_eager")
    assert not gathered_low(new_engine(Net()), lambda e: loss_of(e(IDS)) + compiled(e.module))


@pytest.mark.slow
def test_on_two_ranks_a_penalty_is_that_of_ddp_or_told(tmp_path: Path, has_autocast: bool) -> None:
    if not has_autocast or releases.faults(_deepspeed.release(), 2, 1):
        pytest.skip("this DeepSpeed has no torch_autocast at ZeRO 2")
    for seen in two_ranks.run("autocast/penalties.py", [], tmp_path, 300):
        for stage in ("1", "2"):
            one = seen[stage]
            assert one["none"]["rounded"]
            assert one["none"]["said"] == one["both ranks"]["said"] == one["one rank"]["said"] == []
            for case in ("both ranks", "one rank"):
                assert not one[case]["rounded"]
                assert one[case]["error"] < 1e-6
            (said,) = one["later"]["said"]
            assert "low_precision_gather=False" in said
            assert "low_precision_gather=False" in one["refused"]["error"]
            assert one["refused"]["no gradient"]
