"""Tables in containers inside of containers are measured, and named by a guard with the true reason."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

DIM, ROWS = 16, 512
Pair = tuple[torch.Tensor, torch.Tensor]


def rows(dim: int, count: int) -> Pair:
    """Positions are counted in the default dtype: BF16 knows 256 of them."""
    inverse = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float) / dim)
    phases = torch.outer((torch.cumsum(torch.ones(count), 0) - 1).float(), inverse)
    return phases.cos(), phases.sin()


class Turning(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Linear(dim, dim)
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def tables(self) -> Pair:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in self.tables())
        a, b = x[..., ::2], x[..., 1::2]
        return self.weight(torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2))


class InADict(Turning):
    def make(self) -> None:
        self.held = {"cpu": rows(self.dim, ROWS)}

    def tables(self) -> Pair:
        return self.held["cpu"]


class InAList(Turning):
    def make(self) -> None:
        self.held = [rows(self.dim, ROWS) for _ in range(2)]

    def tables(self) -> Pair:
        return self.held[0]


class DeepInside(Turning):
    def make(self) -> None:
        self.held = {"cpu": [{"cos": one, "sin": two} for one, two in [rows(self.dim, ROWS)]]}

    def tables(self) -> Pair:
        held = self.held["cpu"][0]
        return held["cos"], held["sin"]


class UnderATuple(Turning):
    def make(self) -> None:
        self.held = {(ROWS, "cpu"): rows(self.dim, ROWS)}

    def tables(self) -> Pair:
        return self.held[ROWS, "cpu"]


class InAClosure(Turning):
    def make(self) -> None:
        pair = rows(self.dim, ROWS)
        self.held = lambda: pair

    def tables(self) -> Pair:
        return self.held()


def given(cos: torch.Tensor, *, sin: torch.Tensor) -> Pair:
    return cos, sin


class Bound(Turning):
    def make(self) -> None:
        cos, sin = rows(self.dim, ROWS)
        self.held = functools.partial(given, cos, sin=sin)

    def tables(self) -> Pair:
        return self.held()


class BoundInAList(Turning):
    def make(self) -> None:
        cos, sin = rows(self.dim, ROWS)
        self.held = [functools.partial(given, cos, sin=sin)]

    def tables(self) -> Pair:
        return self.held[0]()


MAKERS = [InADict, InAList, DeepInside, UnderATuple, InAClosure, Bound, BoundInAList]


def built(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.set_default_dtype(dtype)
    try:
        return nn.Sequential(make())
    finally:
        torch.set_default_dtype(torch.float32)


def error(model: nn.Module) -> float:
    true = rows(DIM, ROWS)
    return max(float((a - b).abs().max()) for a, b in zip(model[0].tables(), true, strict=True))


@pytest.mark.parametrize("make", MAKERS)
def test_right_tables_are_ok(make: Callable[[], nn.Module]) -> None:
    model = built(make, torch.float32)
    assert error(model) == 0
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert len(report.modules) == 1


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_damaged_tables_are_damaged_and_named(make: Callable[[], nn.Module], guarded: bool) -> None:
    if guarded:
        with pytest.warns(PrecisionWarning, match="held"), safe_rope.guard() as session:
            model = built(make, torch.bfloat16)
        (entry,) = session.report.unprotected
        assert "held: it holds tables in a container inside of another one" in str(entry)
        assert "on a class" not in str(entry)
    else:
        model = built(make, torch.bfloat16)
    assert error(model) > 1
    report = safe_rope.audit(model)
    assert not report.ok
    assert {found.severity for found in report.findings} == {"damaged"}, str(report)
    assert all(found.what.startswith("held.") for found in report.findings)
    (entry,) = safe_rope.protect(model).unprotected
    assert "held" in str(entry)


@pytest.mark.parametrize("make", MAKERS)
def test_a_guard_in_which_nothing_is_in_the_way_names_none(make: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings(), safe_rope.guard() as session:
        warnings.simplefilter("error", PrecisionWarning)
        model = built(make, torch.float32)
    assert not session.report.unprotected
    assert safe_rope.audit(model.bfloat16()).ok


class Untold(Turning):
    """Its argument is kept nowhere."""

    def __init__(self, wide: int) -> None:
        self.count = 0
        super().__init__(wide)
        del self.dim

    def make(self) -> None:
        self.held = {"cpu": rows(self.dim, ROWS)}

    def tables(self) -> Pair:
        return self.held["cpu"]


def test_what_no_constructor_tells_is_unknown() -> None:
    report = safe_rope.audit(nn.Sequential(Untold(DIM)))
    assert report.verdict == "unknown", str(report)


class Remembers(nn.Module):
    """Its forward keeps cos and sin for each length that it is called with."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.cache: dict[int, Pair] = {}
        inverse = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float) / dim)
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[1]
        if count not in self.cache:
            phases = torch.outer(torch.arange(count).type_as(self.inv_freq), self.inv_freq)
            self.cache[count] = phases.cos(), phases.sin()
        cos, sin = self.cache[count]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def test_tables_that_a_call_has_left_in_pairs_are_named_by_a_later_protect() -> None:
    x = torch.randn(1, ROWS, DIM)
    true, model = Remembers()(x), Remembers().bfloat16()
    model(x.bfloat16())
    with pytest.warns(PrecisionWarning, match="cache: its constructor does not make it"):
        report = safe_rope.protect(model)
    assert len(report.unprotected) == 1
    assert (model(x.bfloat16()).float() - true).abs().max() > 0.5  # as in stock
    assert safe_rope.audit(model).verdict == "unknown"


def test_tables_that_a_protected_forward_leaves_in_pairs_are_its_own() -> None:
    x = torch.randn(1, ROWS, DIM)
    with safe_rope.guard():
        model = Remembers().bfloat16()
    true = Remembers()(x)
    assert (model(x.bfloat16()).float() - true).abs().max() < 0.1
    assert safe_rope.audit(model).ok


class RemembersByDtype(nn.Module):
    """Its forward keeps cos and sin under a tuple for each length and dtype that it is called with."""

    def __init__(self, paired: bool) -> None:
        super().__init__()
        self.paired = paired
        self.cache: dict[tuple[int, torch.dtype], Pair | torch.Tensor] = {}
        inverse = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float) / DIM)
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = x.shape[1], x.dtype
        if key not in self.cache:
            phases = torch.outer(torch.arange(key[0]).type_as(self.inv_freq), self.inv_freq)
            cos, sin = phases.cos().to(x.dtype), phases.sin().to(x.dtype)
            self.cache[key] = (cos, sin) if self.paired else torch.stack((cos, sin))
        cos, sin = self.cache[key]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("paired", [True, False])
def test_tables_that_a_call_has_left_under_a_tuple_are_named_by_a_later_protect(paired: bool) -> None:
    x = torch.randn(1, ROWS, DIM)
    true, model = RemembersByDtype(paired)(x), RemembersByDtype(paired).bfloat16().float()
    stock = model(x)
    with pytest.warns(PrecisionWarning, match="cache: its constructor does not make it"):
        report = safe_rope.protect(model)
    assert len(report.unprotected) == 1
    assert torch.equal(model(x), stock)
    assert (stock - true).abs().max() > 0.1
    assert safe_rope.audit(model).verdict == "unknown"


@pytest.mark.parametrize("paired", [True, False])
def test_tables_that_a_protected_forward_leaves_under_a_tuple_are_its_own(paired: bool) -> None:
    x = torch.randn(1, ROWS, DIM)
    with safe_rope.guard() as session:
        model = RemembersByDtype(paired).bfloat16()
    assert not session.report.unprotected
    true = RemembersByDtype(paired)(x)
    assert (model(x.bfloat16()).float() - true).abs().max() < 0.1
    assert safe_rope.audit(model).ok
