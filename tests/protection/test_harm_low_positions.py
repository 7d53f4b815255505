"""Positions that no buffer shows: frozen parameters, counts in forward, caches on classes and beside them.

Each is right, to one rounding, or its module is named.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import no_harm
import pytest
import torch
from no_harm import BF16, DIM, FP32, LENGTH, Holder
from torch import nn

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")
Tables = tuple[torch.Tensor, torch.Tensor]


def in_default_dtype(length: int, dim: int) -> Tables:
    """cos and sin from counts in whatever dtype torch makes them."""
    inv_freq = 1.0 / 1e4 ** (torch.arange(0.0, dim, 2) / dim)
    phase = torch.outer(torch.arange(0.0, length), inv_freq)
    return phase.cos(), phase.sin()


def true_tables() -> Tables:
    phase = torch.outer(torch.arange(LENGTH, dtype=torch.float32), no_harm.frequencies())
    return phase.cos(), phase.sin()


class FrozenParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 1e4 ** (torch.arange(0.0, DIM, 2) / DIM)
        self.inv_freq = nn.Parameter(inv_freq, requires_grad=False)

    def forward(self, x: torch.Tensor) -> Tables:
        t = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        phase = torch.outer(t, self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class CountsInTheDtypeOfX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", no_harm.frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> Tables:
        t = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        phase = torch.outer(t, self.inv_freq.to(x.dtype))
        return phase.cos(), phase.sin()


class MakesAllInForward(nn.Module):
    """Holds nothing but numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = DIM

    def forward(self, x: torch.Tensor) -> Tables:
        steps = torch.arange(0, self.dim, 2, dtype=x.dtype, device=x.device) / self.dim
        t = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        phase = torch.outer(t, 1.0 / 1e4**steps)
        return phase.cos(), phase.sin()


class CacheByDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", no_harm.frequencies(), persistent=False)
        self.made: dict[Any, Tables] = {}

    def forward(self, x: torch.Tensor) -> Tables:
        key = (x.shape[-2], x.dtype)
        if key not in self.made:
            t = torch.arange(x.shape[-2], device=x.device).to(x.dtype)
            phase = torch.outer(t, self.inv_freq.to(x.dtype))
            self.made[key] = phase.cos(), phase.sin()
        return self.made[key]


class CacheOnTheClass(nn.Module):
    made: dict[int, Tables] = {}

    def __init__(self) -> None:
        super().__init__()
        if LENGTH not in self.made:
            self.made[LENGTH] = in_default_dtype(LENGTH, DIM)

    def forward(self, x: torch.Tensor) -> Tables:
        cos, sin = self.made[x.shape[-2]]
        return cos.to(x.dtype), sin.to(x.dtype)


MADE: dict[int, Tables] = {}


class GlobalCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if LENGTH not in MADE:
            MADE[LENGTH] = in_default_dtype(LENGTH, DIM)

    def forward(self, x: torch.Tensor) -> Tables:
        cos, sin = MADE[x.shape[-2]]
        return cos.to(x.dtype), sin.to(x.dtype)


remembered = functools.lru_cache(maxsize=8)(in_default_dtype)


class RememberedByAFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        remembered(LENGTH, DIM)

    def forward(self, x: torch.Tensor) -> Tables:
        cos, sin = remembered(x.shape[-2], DIM)
        return cos.to(x.dtype), sin.to(x.dtype)


STYLES: dict[str, Callable[[], nn.Module]] = {
    style.__name__: style
    for style in (
        FrozenParameter,
        CountsInTheDtypeOfX,
        MakesAllInForward,
        CacheByDtype,
        CacheOnTheClass,
        GlobalCache,
        RememberedByAFunction,
    )
}


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    def forget() -> None:
        CacheOnTheClass.made.clear()
        MADE.clear()
        remembered.cache_clear()

    forget()
    yield
    forget()


def error(module: nn.Module, dtype: torch.dtype) -> float:
    """The largest error of cos or sin, beyond half a unit of the last place of ``dtype``."""
    with torch.no_grad():
        tables = module(torch.zeros(1, LENGTH, DIM, dtype=dtype))
    worst = 0.0
    for got, true in zip(tables, true_tables(), strict=True):
        assert got.dtype == dtype
        worst = max(worst, float((no_harm.plain(got).float() - true).abs().max()))
    return worst - (2.0**-9 if dtype == BF16 else 0.0)


def gathered(model: nn.Module) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


LOADS = ["zero.Init", "to(bfloat16)", "default dtype", "half and back"]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("style", STYLES)
def test_low_positions_are_right_or_named(style: str, load: str) -> None:
    with no_harm.watched() as said:
        with safe_rope.guard(tables="fp32") as session:
            model = no_harm.LOADS[load](lambda: Holder(STYLES[style]()))
        said.report = session.report
        with gathered(model):
            worst = max(error(model.rope, dtype) for dtype in (BF16, FP32))
    assert worst < 1e-6 or said.names("rope", style), (worst, str(said.report))


@pytest.mark.parametrize("style", STYLES)
def test_what_protect_finds_low_is_right_or_named(style: str) -> None:
    model = no_harm.low_default(lambda: Holder(STYLES[style]())).to(BF16)
    with no_harm.watched() as said:
        said.report = safe_rope.protect(model, tables="fp32")
        worst = max(error(model.rope, dtype) for dtype in (BF16, FP32))
    assert worst < 1e-6 or said.names("rope", style), (worst, str(said.report))


@pytest.mark.parametrize("style", STYLES)
def test_without_the_guard_the_model_in_fp32_is_right(style: str) -> None:
    assert error(STYLES[style](), FP32) < 1e-6


@pytest.mark.parametrize("load", ["default dtype", "zero.Init", "to(bfloat16)"])
def test_a_frozen_parameter_keeps_the_dtype_that_it_has_without_the_guard(load: str) -> None:
    stock = no_harm.LOADS[load](lambda: Holder(FrozenParameter()))
    model, _ = no_harm.guarded(lambda: Holder(FrozenParameter()), load)
    with gathered(stock), gathered(model):
        assert model.rope.inv_freq.dtype == stock.rope.inv_freq.dtype == BF16
        assert isinstance(model.rope.inv_freq, nn.Parameter)
        assert torch.equal(model.rope.inv_freq.detach().cpu(), no_harm.frequencies().to(BF16)), "rounded once"


# ---- functions that remember something else than tables --------------------------------------------------


class Recipe:
    """What a pattern of axes says, as einops keeps it."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes, self.sizes = axes, {axis: index for index, axis in enumerate(axes)}


@functools.lru_cache(maxsize=8)
def recipe(pattern: str) -> Recipe:
    return Recipe(tuple(pattern.split()))


@functools.lru_cache(maxsize=8)
def factors(dim: int) -> list[float]:
    return [1e4 ** (-i / dim) for i in range(0, dim, 2)]


class CountsByARememberedPattern(CountsInTheDtypeOfX):
    def forward(self, x: torch.Tensor) -> Tables:
        sizes = recipe("batch positions channels").sizes
        t = torch.arange(x.shape[sizes["positions"]], device=x.device, dtype=x.dtype)
        phase = torch.outer(t, self.inv_freq.to(x.dtype))
        return phase.cos(), phase.sin()


class CountsByRememberedFactors(CountsInTheDtypeOfX):
    def forward(self, x: torch.Tensor) -> Tables:
        t = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        phase = torch.outer(t, torch.tensor(factors(DIM), dtype=x.dtype))
        return phase.cos(), phase.sin()


@pytest.fixture
def no_pattern_known() -> Iterator[None]:
    recipe.cache_clear()
    factors.cache_clear()
    yield
    recipe.cache_clear()
    factors.cache_clear()


@pytest.mark.contract
@pytest.mark.usefixtures("no_pattern_known")
@pytest.mark.parametrize("how", ["guard", "protect", "audit and protect"])
def test_a_function_that_remembers_no_tables_leaves_positions_to_the_guard(how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "guard":
            model, _ = no_harm.guarded(lambda: Holder(CountsByARememberedPattern()), "to(bfloat16)")
        else:
            model = Holder(CountsByARememberedPattern()).to(BF16)
            if how == "audit and protect":
                assert not safe_rope.audit(model).ok
            safe_rope.protect(model, tables="fp32")
        assert error(model.rope, BF16) < 1e-6
    assert error(CountsByARememberedPattern().to(BF16), BF16) > 0.1, "as in stock without it"


@pytest.mark.usefixtures("no_pattern_known")
def test_numbers_that_a_function_remembers_stay_as_in_stock_and_are_named() -> None:
    with no_harm.watched() as said:
        with safe_rope.guard(tables="fp32") as session:
            model = Holder(CountsByRememberedFactors()).to(BF16)
        said.report = session.report
        error(model.rope, BF16)
    assert said.names("rope", "CountsByRememberedFactors"), str(said.report)
