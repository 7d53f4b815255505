"""Finished tables that a parent or a user changes, wherever a module keeps them, stay changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import no_harm
import pytest
import torch
from no_harm import BF16, DIM, FP32, LENGTH
from torch import nn

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")


def sines() -> torch.Tensor:
    phase = torch.outer(torch.arange(LENGTH, dtype=torch.float32), no_harm.frequencies())
    return torch.cat((phase.sin(), phase.cos()), -1)


class Table(nn.Module):
    """Adds rows of a table; ``get`` and ``put`` say where it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.fill(sines())

    def fill(self, table: torch.Tensor) -> None:
        self.register_buffer("table", table, persistent=False)

    def get(self) -> Any:
        return self.table

    def put(self, table: torch.Tensor) -> None:
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.get()[: x.shape[-2]].to(x.dtype)


class InTheCheckpoint(Table):
    def fill(self, table: torch.Tensor) -> None:
        self.register_buffer("table", table)


class Attribute(Table):
    def fill(self, table: torch.Tensor) -> None:
        self.table = table


class InAList(Table):
    def fill(self, table: torch.Tensor) -> None:
        self.tables = [table]

    def get(self) -> Any:
        return self.tables[0]

    def put(self, table: torch.Tensor) -> None:
        self.tables[0] = table


class InAnObject(Table):
    def fill(self, table: torch.Tensor) -> None:
        self.holder = SimpleNamespace(table=table)

    def get(self) -> Any:
        return self.holder.table

    def put(self, table: torch.Tensor) -> None:
        self.holder.table = table


STYLES = {style.__name__: style for style in (Table, InTheCheckpoint, Attribute, InAList, InAnObject)}


def doubled(module: Table) -> None:
    module.put(module.get() * 2)


def doubled_in_place(module: Table) -> None:
    module.get().mul_(2)


def without_a_first_row(module: Table) -> None:
    module.get()[0] = 0


def shortened(module: Table) -> None:
    module.put(module.get()[: LENGTH // 2].clone())


WRITES: dict[str, Callable[[Table], None]] = {
    write.__name__: write for write in (doubled, doubled_in_place, without_a_first_row, shortened)
}


class Parent(nn.Module):
    def __init__(self, style: str, write: str | None = None) -> None:
        super().__init__()
        self.positions = STYLES[style]()
        if write is not None:
            WRITES[write](self.positions)
        self.layer = nn.Linear(DIM, DIM)


def assert_holds(model: Any, true: torch.Tensor) -> None:
    x = torch.zeros(1, len(true), DIM)
    for dtype in (FP32, BF16):
        assert torch.equal(model.positions(x.to(dtype))[0], true.to(dtype))
    again = copy.deepcopy(model).float()
    assert torch.equal(again.positions.get(), true)
    assert torch.equal(again.positions(x)[0], true)


@pytest.mark.parametrize("load", no_harm.FILLED)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("style", STYLES)
def test_what_a_parent_writes_stays(style: str, write: str, load: str) -> None:
    true = Parent(style, write).positions.get().clone()
    model, _ = no_harm.guarded(lambda: Parent(style, write), load)
    assert_holds(model, true)


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("style", STYLES)
def test_what_a_user_writes_stays(style: str, write: str, how: str) -> None:
    true = Parent(style, write).positions.get().clone()
    if how == "guard":
        model, _ = no_harm.guarded(lambda: Parent(style))
    else:
        model = Parent(style)
        no_harm.protected(model)
    model.positions(torch.zeros(1, 4, DIM))
    WRITES[write](model.positions)
    assert_holds(model, true)
    assert_holds(model.to(BF16), true)


@pytest.mark.parametrize("write", WRITES)
def test_other_values_of_a_checkpoint_win_over_those_of_the_constructor(write: str) -> None:
    changed = Parent("InTheCheckpoint", write)
    if len(changed.positions.get()) != LENGTH:
        pytest.skip("a load refuses another shape")
    with safe_rope.guard():
        model = Parent("InTheCheckpoint")
    model.load_state_dict(changed.state_dict())
    assert_holds(model, changed.positions.get())
    assert_holds(model.half(), changed.positions.get())


class WidenedPairs(nn.Module):
    """Keeps cos and sin as pairs, and turns by them in FP32, as it asks for."""

    def __init__(self) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LENGTH, dtype=torch.float32), no_harm.frequencies())
        self.register_buffer("pairs", torch.stack((phase.cos(), phase.sin()), -1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = torch.view_as_complex(self.pairs[: x.shape[-2]].float().contiguous())
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn
        return torch.view_as_real(turned).flatten(-2).type_as(x)


class WidenedTables(WidenedPairs):
    """Returns them in FP32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pairs[: x.shape[-2]].float() + 0 * x.float().unflatten(-1, (-1, 2))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("make", [WidenedPairs, WidenedTables])
def test_code_that_asks_for_fp32_gets_the_exact_table(make: type[nn.Module], how: str, graph: bool) -> None:
    x = torch.linspace(-1, 1, LENGTH * DIM).view(LENGTH, DIM).bfloat16()
    stock = make().to(torch.bfloat16)(x)
    expected = make()(x.float()).to(stock.dtype)
    with safe_rope.guard() if how == "guard" else contextlib.nullcontext():
        model = make()
    model = model.to(torch.bfloat16)
    if how == "protect":
        safe_rope.protect(model)
    called = torch.compile(model, backend="eager") if graph else model
    torch.testing.assert_close(called(x), expected, rtol=0, atol=0)
    assert not torch.equal(stock, expected)


class MadeAnew(nn.Module):
    """InternLM's: a cache in plain attributes, made anew where it has another dtype than ``x``."""

    asks_a_variable = False

    def __init__(self, dim: int) -> None:  # does not keep it: nobody can build the module again
        super().__init__()
        self.inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)
        self.make(LENGTH, torch.float32)

    def make(self, length: int, dtype: torch.dtype) -> None:
        self.length = length
        phases = torch.outer(torch.arange(length, dtype=self.inv_freq.dtype), self.inv_freq)
        emb = torch.cat((phases, phases), -1)
        self.cos_cached, self.sin_cached = emb.cos().to(dtype), emb.sin().to(dtype)

    def has_another(self, dtype: torch.dtype) -> bool:
        return self.cos_cached.dtype != dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        differs = self.has_another(x.dtype) if self.asks_a_variable else self.cos_cached.dtype != x.dtype
        if x.shape[1] > self.length or differs:
            self.make(x.shape[1], x.dtype)
        return self.cos_cached[: x.shape[1]], self.sin_cached[: x.shape[1]]


class MadeAnewForAVariable(MadeAnew):
    asks_a_variable = True


@pytest.mark.parametrize("make", [MadeAnew, MadeAnewForAVariable])
@pytest.mark.parametrize("graph", [False, True])
def test_a_cache_that_a_forward_makes_anew_for_its_dtype_is_made_anew(
    make: type[nn.Module], graph: bool
) -> None:
    x = torch.zeros(1, LENGTH, DIM)
    true = make(DIM)(x)
    with no_harm.zero_init():
        model = make(DIM)
    assert not torch.equal(model.cos_cached, true[0])
    safe_rope.protect(model)
    if graph:
        torch._dynamo.reset()
    called = torch.compile(model, backend="eager") if graph else model
    for _ in range(2):
        for made, exact in zip(called(x.to(BF16)), true, strict=True):
            assert made.dtype == BF16
            assert (made.float() - exact).abs().max() <= 2.0**-8


class ComparesAndCounts(nn.Module):
    """Compares dtypes, and counts its calls: it makes no table anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000.0 ** (torch.arange(0, DIM, 2) / DIM), persistent=False)
        self.calls = 0
        self.make()

    def make(self) -> None:
        self.register_buffer("cos_cached", torch.outer(torch.arange(LENGTH), self.inv_freq).cos())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inv_freq.dtype != self.cos_cached.dtype:
            raise ValueError("cast both")
        self.calls += 1
        phases = torch.outer(torch.arange(x.shape[1]).to(self.inv_freq.dtype), self.inv_freq)
        return phases.sin().to(x.dtype) * self.cos_cached[: x.shape[1]]


class ComparesAndCasts(ComparesAndCounts):
    """Keeps a cast of its table where that has another dtype than ``x``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cos_cached.dtype != x.dtype:
            self.cos_cached = self.cos_cached.to(x.dtype)
        return self.cos_cached[: x.shape[1]]


@pytest.mark.parametrize("make", [ComparesAndCounts, ComparesAndCasts])
def test_a_forward_that_makes_no_table_anew_keeps_its_precision_beside_one_that_is_kept(
    make: type[Any],
) -> None:
    model, true = make(), make()
    for one in (model, true):
        one.cos_cached.mul_(1.25)  # no constructor gives that
    safe_rope.protect(model)
    model.bfloat16()
    x = torch.zeros(1, LENGTH, DIM)
    for _ in range(2):
        made = model(x.to(BF16))
        assert type(made) is torch.Tensor
        assert made.dtype == BF16
        assert (made.float() - true(x)).abs().max() <= 1.25 * 2.0**-8
