"""Buffers that something puts into a position module after its construction are kept as those of before."""

from __future__ import annotations

import copy
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

DIM = 32
LENGTH = 600


def frequencies() -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Phases(nn.Module, ABC):
    """Takes sines of positions times the speeds that a class below has."""

    @property
    @abstractmethod
    def speeds(self) -> torch.Tensor: ...

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = torch.outer(torch.arange(x.shape[1]).to(self.speeds.dtype), self.speeds)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class ByAProperty(Phases):
    """The first who asks for the frequencies makes a buffer of them."""

    @property
    def speeds(self) -> torch.Tensor:
        if "kept" not in self._buffers:
            self.register_buffer("kept", frequencies(), persistent=False)
        kept: torch.Tensor = self.kept
        return kept


class InDouble(Phases):
    """The buffer is in double."""

    @property
    def speeds(self) -> torch.Tensor:
        if "kept" not in self._buffers:
            self.register_buffer("kept", frequencies().double(), persistent=False)
        kept: torch.Tensor = self.kept
        return kept


class WhenTold(Phases):
    """A method that somebody calls registers the frequencies."""

    def build(self) -> None:
        self.register_buffer("kept", frequencies())

    @property
    def speeds(self) -> torch.Tensor:
        kept: torch.Tensor = self.kept
        return kept


class Tables(nn.Module):
    """A method that somebody calls registers cos and sin."""

    def build(self, length: int) -> None:
        phase = torch.outer(torch.arange(length).float(), frequencies())
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]


def fill(module: WhenTold, args: Any) -> None:
    """Have a module build before its first forward."""
    if "kept" not in module._buffers:
        module.build()


class Rotates(nn.Module):
    """Rotates its input by what a module returns."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope
        self.out = nn.Linear(DIM, DIM)
        nn.init.eye_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.rope, WhenTold):
            fill(self.rope, (x,))
        return self.out(turned(x, *self.rope(x)))


class Reads(Rotates):
    """Has tables built, and reads them by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "cos" not in self.rope._buffers:
            self.rope.build(LENGTH)
            self.rope.to(self.out.weight.dtype)
        n = x.shape[1]
        return self.out(turned(x, self.rope.cos[:n], self.rope.sin[:n]))


def by_a_property() -> nn.Module:
    return Rotates(ByAProperty())


def in_double() -> nn.Module:
    return Rotates(InDouble())


def by_a_parent() -> nn.Module:
    return Rotates(WhenTold())


def by_a_hook() -> nn.Module:
    rope = WhenTold()
    rope.register_forward_pre_hook(fill)
    return rope


def tables_read() -> nn.Module:
    return Reads(Tables())


def hidden(dtype: torch.dtype) -> torch.Tensor:
    steps = torch.arange(LENGTH * DIM).reshape(1, LENGTH, DIM)
    return ((steps * 37) % 17 - 8).to(dtype) / 8


def cast(model: nn.Module) -> nn.Module:
    model(hidden(torch.float32))
    return model.to(torch.bfloat16)


def cast_twice(model: nn.Module) -> nn.Module:
    model.to(torch.bfloat16)(hidden(torch.bfloat16))
    return model.to(torch.bfloat16)


def copied(model: nn.Module) -> nn.Module:
    model(hidden(torch.float32))
    return copy.deepcopy(model).to(torch.bfloat16)


def from_a_file(model: nn.Module) -> nn.Module:
    model(hidden(torch.float32))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded.to(torch.bfloat16)


MAKERS = (by_a_property, in_double, by_a_parent, by_a_hook)
LOADS = (cast, cast_twice, copied, from_a_file)


@torch.no_grad()
def answers(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    result = model(hidden(dtype))
    return list(result) if isinstance(result, tuple) else [result]


def off(got: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, true, strict=True))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("make", MAKERS)
@torch.no_grad()
def test_frequencies_that_come_later_stay_exact(
    make: Callable[[], nn.Module], load: Callable[[nn.Module], nn.Module]
) -> None:
    """Property, method, hook: who registers them plays no part. A cast rounded them without a word."""
    true = answers(make(), torch.float32)
    stock = load(make())
    with safe_rope.guard():
        guarded = make()
    guarded = load(guarded)
    got, without = answers(guarded, torch.bfloat16), answers(stock, torch.bfloat16)
    assert off(got, true) < 0.02 < 0.5 < off(without, true)
    assert [one.dtype for one in got] == [one.dtype for one in without]
    saved = {name: value.dtype for name, value in guarded.state_dict().items()}
    assert saved == {name: value.dtype for name, value in stock.state_dict().items()}
    # Of a hook nobody knows what it computes.
    assert safe_rope.audit(guarded).verdict == ("unknown" if make is by_a_hook else "ok")


@pytest.mark.parametrize("load", LOADS)
@torch.no_grad()
def test_tables_that_a_parent_has_built_and_reads_look_like_those_of_the_stock_model(
    load: Callable[[nn.Module], nn.Module],
) -> None:
    """Exact tables that met BF16 as FP32 would raise in the layer behind."""
    true = answers(tables_read(), torch.float32)
    stock = load(tables_read())
    with safe_rope.guard():
        guarded = tables_read()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = answers(load(guarded), torch.bfloat16)
    without = answers(stock, torch.bfloat16)
    assert got[0].dtype == without[0].dtype
    assert off(got, true) <= off(without, true)


@torch.no_grad()
def test_what_a_module_with_weights_is_given_later_is_its_own() -> None:
    """Only what makes nothing but positions is taken to hold some."""
    with safe_rope.guard():
        model = by_a_property()
    model.register_buffer("gain", torch.linspace(0.1, 0.9, DIM))
    model.to(torch.bfloat16)
    assert model.gain.dtype == torch.bfloat16
