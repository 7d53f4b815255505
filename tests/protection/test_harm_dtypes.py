"""A model that runs without the guard runs with it, in every dtype, and returns the same dtypes."""

from __future__ import annotations

import contextlib
from typing import Any

import mixed_styles
import no_harm
import pytest
import torch
from mixed_styles import LENGTH, STYLES, WIDTH
from no_harm import BF16, FP32
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

pytestmark = pytest.mark.usefixtures("deepspeed_group")
LOADS = {**no_harm.LOADS, "half": lambda make: make().half(), "double": lambda make: make().double()}
del LOADS["meta"]  # nobody fills the weights


def gathered(model: nn.Module, write: bool = False) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0 if write else None)


def fill(model: nn.Module) -> nn.Module:
    """Give ``model`` weights that are the same in every dtype."""
    generator = torch.Generator().manual_seed(0)
    with gathered(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * (1.5 / parameter.shape[-1] ** 0.5)
            parameter.copy_(values.to(BF16))
    return model


def inputs(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.to(BF16).to(dtype)


def outcome(model: nn.Module, dtype: torch.dtype, autocast: bool = False) -> torch.Tensor | str:
    """What ``model`` returns, or which error it raises."""
    with torch.no_grad(), gathered(model), contextlib.ExitStack() as stack:
        if autocast:
            stack.enter_context(torch.autocast("cpu", dtype=BF16))
        try:
            return no_harm.plain(model(inputs(dtype)))
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def assert_as_without(model: nn.Module, stock: nn.Module, truth: nn.Module, autocast: bool = False) -> None:
    for dtype in dict.fromkeys((dtype_of(stock), FP32)):
        expected = outcome(stock, dtype, autocast)
        got = outcome(model, dtype, autocast)
        if isinstance(expected, str):
            continue  # running where the stock model does not is no harm
        assert isinstance(got, torch.Tensor), f"the stock model runs: {got}"
        assert got.dtype == expected.dtype
        true = outcome(truth, FP32)
        assert isinstance(true, torch.Tensor)
        rounding = 2.0**-8 if min(dtype_of(stock).itemsize, dtype.itemsize) < 4 or autocast else 1e-5
        allowed = 1.5 * (expected - true).abs().max() + rounding * true.abs().max()
        assert (got - true).abs().max() <= allowed, "worse than stock"


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("style", STYLES)
def test_a_guarded_model_runs_as_the_stock_one(style: str, load: str) -> None:
    stock = fill(LOADS[load](STYLES[style]))
    with safe_rope.guard(tables="fp32"):
        model = LOADS[load](STYLES[style])
    assert_as_without(fill(model), stock, fill(STYLES[style]()))


@pytest.mark.parametrize("load", ["FP32", "to(bfloat16)", "half", "double"])
@pytest.mark.parametrize("style", STYLES)
def test_a_model_that_is_protected_and_then_cast_runs_as_the_stock_one(style: str, load: str) -> None:
    model = STYLES[style]()
    with no_harm.watched():
        safe_rope.protect(model, tables="fp32")
    assert_as_without(
        fill(LOADS[load](lambda: model)), fill(LOADS[load](STYLES[style])), fill(STYLES[style]())
    )


@pytest.mark.parametrize("load", ["to(bfloat16)", "half"])
@pytest.mark.parametrize("style", STYLES)
def test_a_model_that_is_cast_and_then_protected_runs_as_the_stock_one(style: str, load: str) -> None:
    model = LOADS[load](STYLES[style])
    with no_harm.watched():
        safe_rope.protect(model, tables="fp32")
    assert_as_without(fill(model), fill(LOADS[load](STYLES[style])), fill(STYLES[style]()))


@pytest.mark.parametrize("load", ["FP32", "to(bfloat16)"])
@pytest.mark.parametrize("style", STYLES)
def test_under_autocast_it_runs_as_the_stock_one(style: str, load: str) -> None:
    with safe_rope.guard(tables="fp32"):
        model = LOADS[load](STYLES[style])
    stock = fill(LOADS[load](STYLES[style]))
    assert_as_without(fill(model), stock, fill(STYLES[style]()), autocast=True)


@pytest.mark.parametrize("style", STYLES)
def test_in_full_precision_again_it_is_right_or_named(style: str) -> None:
    with no_harm.watched() as said:
        with safe_rope.guard(tables="fp32") as session:
            model = STYLES[style]()
        said.report = session.report
    true, got = outcome(fill(STYLES[style]()), FP32), outcome(fill(model.half().bfloat16().float()), FP32)
    named = any(entry.reason for entry in (*said.report.protected, *said.report.unprotected))
    assert (got - true).abs().max() < 1e-5 or named or said.warnings


@pytest.mark.parametrize("style", STYLES)
def test_what_a_file_holds_is_what_stock_would_have_saved(style: str) -> None:
    for load in LOADS:
        stock = LOADS[load](STYLES[style])
        with safe_rope.guard():
            model = LOADS[load](STYLES[style])
        expected = {name: value.dtype for name, value in stock.state_dict().items()}
        assert {name: value.dtype for name, value in model.state_dict().items()} == expected, load


class _Holder(nn.Module):
    def __init__(self, cos: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("cos", cos)


class _Above(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = 1e4 ** -(torch.arange(0, 16, 2).float() / 16)
        self.holder = _Holder(torch.outer(torch.arange(64).float(), rates).cos())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos: torch.Tensor = self.holder.cos
        return cos[: x.shape[1]].to(x.dtype)


@pytest.mark.parametrize("assign", ["data", "buffer"])
def test_a_table_that_somebody_casts_by_itself_is_exact_and_saved_in_that_dtype(assign: str) -> None:
    with safe_rope.guard():
        model = _Above()
    true = model.holder.cos.clone()
    if assign == "data":
        model.holder.cos.data = model.holder.cos.data.bfloat16()
    else:
        model.holder._buffers["cos"] = model.holder.cos.bfloat16()
    assert model.state_dict()["holder.cos"].dtype == BF16  # nothing has been called yet
    assert torch.equal(model(torch.zeros(1, 64, 16)), true)


def test_a_table_that_somebody_casts_and_changes_by_itself_is_saved_in_that_dtype() -> None:
    model = _Above()
    safe_rope.protect(model)
    cos = model.holder._buffers["cos"]
    assert cos is not None
    cos.data = cos.data.bfloat16()
    cos.mul_(0.5)
    saved = model.state_dict()["holder.cos"]
    assert saved.dtype == BF16
    assert torch.equal(saved, cos)


def test_what_is_asked_of_these_styles_means_something() -> None:
    """Positions of the tables go through bfloat16 with an error that can be seen."""
    stock = fill(mixed_styles.OwnsFrequencies().to(BF16))
    true = outcome(fill(mixed_styles.OwnsFrequencies()), FP32)
    assert (outcome(stock, BF16).float() - true).abs().max() > 1e-3


def test_frequencies_that_a_graph_rounds_are_named() -> None:
    """Nothing follows a table through Dynamo: the compiled module is as stock, and says so."""
    stock = fill(mixed_styles.OwnsFrequencies().to(BF16))
    with safe_rope.guard():
        model = fill(mixed_styles.OwnsFrequencies())
    model.to(BF16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(PrecisionWarning, match="OwnsFrequencies computes from inv_freq"):
        got = outcome(compiled, BF16)
    assert torch.equal(got, outcome(stock, BF16))


class MadeInADtype(nn.Module):
    """As ChatGLM's: frequencies of the dtype that it is asked for, which its forward asks for theirs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("inv_freq", (10000.0 ** (-torch.arange(0, 16, 2) / 16)).to(dtype))

    def forward(self, length: int) -> torch.Tensor:
        counted = torch.arange(length, dtype=self.inv_freq.dtype)
        theta = 10000.0 ** (-torch.arange(0, 16, 2, dtype=self.inv_freq.dtype) / 16)
        return torch.outer(counted, theta).float().cos()


CASTS: tuple[tuple[torch.dtype, ...], ...] = ((), (FP32,), (torch.float64,), (torch.float16,), (BF16, FP32))


@pytest.mark.parametrize("casts", CASTS, ids=str)
@pytest.mark.parametrize("made", [BF16, torch.float16, FP32], ids=str)
def test_a_table_of_16_bits_has_the_dtype_that_its_casts_give_it(
    made: torch.dtype, casts: tuple[torch.dtype, ...]
) -> None:
    def built() -> nn.Module:
        module: nn.Module = MadeInADtype(made)
        for dtype in casts:
            module = module.to(dtype)
        return module

    truth = MadeInADtype(FP32)(1500)
    with safe_rope.guard():
        module = built()
    off, stock_off = ((one(1500) - truth).abs().max() for one in (module, built()))
    assert off <= stock_off + 1e-6
    if made != FP32:
        assert module.inv_freq.dtype == built().inv_freq.dtype
