"""The guard changes nothing about parameters: partitions, optimizer groups, initial values are stock's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.load_paths import PATHS, zero_init

import safe_rope

pytestmark = [pytest.mark.usefixtures("deepspeed_state"), pytest.mark.contract]


def described(model: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (
            parameter.dtype,
            tuple(parameter.shape),
            tuple(parameter.ds_shape),
            parameter.ds_numel,
            parameter.ds_tensor.dtype,
            parameter.ds_tensor.numel(),
            parameter.ds_tensor.ds_numel,
            parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_partitions_under_zero_init_are_stock(family: str, dtype: torch.dtype) -> None:
    with zero_init(dtype):
        stock = families.build(family)
    with safe_rope.guard(), zero_init(dtype):
        guarded = families.build(family)
    assert described(guarded) == described(stock)
    assert {entry[0] for entry in described(stock).values()} == {dtype}
    assert list(guarded.state_dict()) == list(stock.state_dict())
    for (name, ours), theirs in zip(guarded.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours.ds_tensor, theirs.ds_tensor), name


def groups(engine: Any) -> list[list[tuple[Any, ...]]]:
    wrapped = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return [
        [(p.dtype, tuple(p.shape), p.requires_grad) for p in group["params"]]
        for group in wrapped.param_groups
    ]


@pytest.mark.parametrize("path", ["zero.Init + initialize", "from_pretrained + ZeRO-2"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_optimizer_groups_and_weights_are_stock(family: str, path: str, checkpoints: dict[str, Path]) -> None:
    found = []
    for guard in (contextlib.nullcontext(), safe_rope.guard()):
        with guard:
            engine = PATHS[path](family, checkpoints[family])
        weights = [p.dtype for p in engine.module.parameters()]
        found.append((groups(engine), weights, list(engine.module.state_dict())))
        engine.destroy()
    assert found[0] == found[1]
