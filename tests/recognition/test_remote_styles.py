"""Position modules in the styles of remote code: tables in every place where such code keeps them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import remote_styles as styles
import torch
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

LENGTHS = (8, 100, 40, 130, 100)  # caches of 64 rows grow twice


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    styles.remembered.cache_clear()


def direct(style: str) -> nn.Module:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path={**config, "bf16": {"enabled": True}}):
        return styles.StyledModel(style)


def cast(style: str) -> nn.Module:
    return styles.StyledModel(style).to(torch.bfloat16)


def low_default(style: str) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return styles.StyledModel(style)
    finally:
        torch.set_default_dtype(torch.float32)


def meta(style: str) -> nn.Module:
    with torch.device("meta"):
        model = styles.StyledModel(style)
    return model.to_empty(device="cpu")


PATHS: dict[str, Callable[[str], nn.Module]] = {
    "zero.Init": direct,
    "to(bfloat16)": cast,
    "default dtype": low_default,
    "meta": meta,
}


def table(module: nn.Module, name: str) -> Any:
    owner, _, key = name.partition(".")
    value = getattr(module, owner)
    if not key:
        return value
    if isinstance(value, list | tuple):
        return value[int(key)]
    return value[key] if isinstance(value, dict) else getattr(value, key)


def assert_same_tables(actual: nn.Module, truth: nn.Module) -> None:
    for name in type(truth).TABLES:
        expected, got = table(truth, name), table(actual, name)
        if expected is not None:
            rows = min(len(expected), len(got))  # what is protected fully never gets shorter
            assert got.dtype == expected.dtype, name
            assert (got[:rows] - expected[:rows]).abs().max() < 1e-5, name  # exact, not FP32 phases


@pytest.mark.usefixtures("deepspeed_group")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("style", styles.STYLES)
def test_every_style_stays_true(style: str, path: str) -> None:
    truth = styles.STYLES[style](styles.DIM)
    with safe_rope.guard(strict=True) as session:
        model = PATHS[path](style)
    assert len(session.report.protected) == 2
    rotary = model.layers[1].rotary
    assert_same_tables(rotary, truth)
    for length in LENGTHS:
        x = torch.zeros(1, length, styles.DIM)
        expected = styles.ask(truth, x, length)
        for got, wanted in zip(styles.ask(rotary, x.bfloat16(), length), expected, strict=True):
            assert got.shape == wanted.shape, length
            scale = wanted.abs().clamp(min=1)
            assert ((got.float() - wanted).abs() / scale).max() < 2**-8, length  # rounded once
        assert_same_tables(rotary, truth)
    model.to(torch.bfloat16)
    assert_same_tables(rotary, truth)


CONTAINERS = ("ListOfTables", "DictOfTables", "TupleOfTables", "Holder")


@pytest.mark.parametrize("style", CONTAINERS)
def test_tables_in_containers_are_copied_with_the_module(style: str) -> None:
    truth = styles.STYLES[style](styles.DIM)
    with safe_rope.guard():
        model = low_default(style)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_tables(other.layers[0].rotary, truth)
        assert set(vars(other.layers[0].rotary)) == set(vars(model.layers[0].rotary))


def test_what_a_module_computes_anew_in_forward_is_kept() -> None:
    class Rescaled(styles.InterleavedCache):
        """Other frequencies from the second forward on, in a table of the same shape."""

        def forward(self, x: torch.Tensor, length: int) -> styles.Pair:
            result = super().forward(x, length)
            self.rope_cache = self.rope_cache * 2
            return result

    with safe_rope.guard():
        model = nn.Sequential(Rescaled(styles.DIM)).to(torch.bfloat16)
    true = torch.stack(styles.cos_sin(styles.DIM, 512), -1)
    for times in (2, 4, 8):
        model[0](torch.zeros(1, 4, styles.DIM, dtype=torch.bfloat16), 4)
        assert torch.equal(model[0].rope_cache, true * times)
    assert torch.equal(copy.deepcopy(model).half()[0].rope_cache, true * 8)


def test_a_forward_that_does_more_than_make_tables_runs_once() -> None:
    class Attention(styles.CachedBuffers):
        """Makes its tables itself, anew in the dtype of x where they are too short, and writes to a cache."""

        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.projection = nn.Linear(dim, dim)

        def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
            if x.shape[1] > len(self.cos_cached):
                self.fill(x.shape[1], x.dtype)
            cache.append(self.projection(x) if x.dtype == self.projection.weight.dtype else x)
            return cache[-1] * self.cos_cached[: x.shape[1]].to(x.dtype)

    with safe_rope.guard():
        attention = nn.Sequential(Attention(styles.DIM)).to(torch.bfloat16)[0]
    cache: list[torch.Tensor] = []
    attention(torch.zeros(1, 4, styles.DIM, dtype=torch.bfloat16), cache)
    assert (attention.cos_cached - styles.CachedBuffers(styles.DIM).cos_cached).abs().max() < 1e-5
    with pytest.warns(PrecisionWarning, match="cos_cached anew in torch.bfloat16"):
        attention(torch.zeros(1, 90, styles.DIM, dtype=torch.bfloat16), cache)
    assert len(cache) == 2


def test_what_a_module_computes_anew_outside_forward_is_kept() -> None:
    with safe_rope.guard():
        model = nn.Sequential(styles.YarnBuffers(styles.DIM))
    model[0].fill(90, torch.float32)
    truth = styles.YarnBuffers(styles.DIM)
    truth.fill(90, torch.float32)
    cos, _ = model[0](torch.zeros(1, 90, styles.DIM), 90)
    assert torch.equal(cos, truth.cos_cached)
    assert torch.equal(model.to(torch.bfloat16)[0].cos_cached, truth.cos_cached)


def test_a_function_remembers_afterwards_what_it_did_before() -> None:
    before = styles.remembered(styles.DIM, 512)
    with safe_rope.guard():
        styles.StyledModel("Remembered")
    assert styles.remembered(styles.DIM, 512) is before
