"""A model that fills its own tables by the method which initialises a module that it is given.

The truth of the tables is what the same code makes in FP32 without the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from support.default_dtype import default_dtype
from torch import Tensor, nn

import safe_rope

pytestmark = pytest.mark.contract

BASE = 10000.0
CALLS = [0]


@contextlib.contextmanager
def base(value: float) -> Iterator[None]:
    before, globals()["BASE"] = BASE, value
    try:
        yield
    finally:
        globals()["BASE"] = before


def sines(base: float) -> Tensor:
    phases = torch.arange(64)[:, None] * base ** -(torch.arange(0, 16, 2) / 16)
    return torch.cat((phases.sin(), phases.cos()), -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("table", torch.empty(64, 16), persistent=False)
        self._init_weights(self)

    def _init_weights(self, module: nn.Module) -> None:
        module.table = sines(BASE)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.linear(x + self.table[positions].to(x.dtype))  # type: ignore[no-any-return]


class Applied(Model):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("table", torch.empty(64, 16), persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            super()._init_weights(module)


class Counted(Model):
    def _init_weights(self, module: nn.Module) -> None:
        CALLS[0] += 1
        module.table = sines(1000.0 * CALLS[0])


class ByAChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.part = Part()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Part):
            module.inv_freq.copy_(BASE ** -(torch.arange(0, 16, 2) / 16) + torch.zeros(8).sin())


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(8), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return (positions[:, None] * self.inv_freq).cos()


class Filled(Part):
    def fill(self) -> None:
        self.inv_freq.copy_(BASE ** -(torch.arange(0, 16, 2).float() / 16))


class ByAMethod(ByAChild):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        CALLS[0] += 1
        self.linear = nn.Linear(16, 16)
        self.part = Filled()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Filled):
            module.fill()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.part(torch.arange(len(x)))  # type: ignore[no-any-return]


def two(cls: type[nn.Module]) -> nn.Module:
    CALLS[0] = 0
    return nn.Sequential(cls(), cls())


def tables(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("cls", [Model, Applied, Counted, ByAChild])
def test_tables_from_meta_follow_the_setting_that_the_constructor_has_read(cls: type[nn.Module]) -> None:
    with base(500.0):
        true = tables(two(cls))
    with safe_rope.guard():
        with torch.device("meta"), base(500.0):
            model = two(cls)
        model.to_empty(device="cpu")
    assert all(map(torch.equal, tables(model), true))


def test_tables_that_follow_a_count_are_kept() -> None:
    true = tables(two(Counted))
    with safe_rope.guard() as session, default_dtype(torch.bfloat16):
        model = two(Counted)
    model.to(torch.bfloat16)
    assert all(map(torch.equal, tables(model), true))
    assert not session.report.unprotected


@pytest.mark.parametrize("is_cast", [False, True])
def test_what_a_parent_has_a_child_fill_in_16_bits_is_exact(is_cast: bool) -> None:
    true = tables(ByAMethod())
    with safe_rope.guard() as session:
        if is_cast:
            model = ByAMethod().to(torch.bfloat16)
        else:
            with default_dtype(torch.bfloat16):
                model = ByAMethod()
    assert all(map(torch.equal, tables(model), true))
    assert not session.report.unprotected
    assert safe_rope.audit(model).ok


def test_what_a_loader_fills_anew_as_its_parent_does_is_exact() -> None:
    true = tables(ByAMethod())
    with safe_rope.guard() as session:
        with torch.device("meta"), default_dtype(torch.bfloat16):
            model = ByAMethod()
        for name, parameter in model.linear.named_parameters():
            setattr(model.linear, name, nn.Parameter(torch.zeros_like(parameter, device="cpu")))
        model.part.inv_freq = torch.empty_like(model.part.inv_freq, device="cpu")
        model.apply(model._init_weights)
        model.eval()
    assert all(map(torch.equal, tables(model), true))
    assert not session.report.unprotected
    assert safe_rope.audit(model).ok


@pytest.mark.filterwarnings("ignore::safe_rope.PrecisionWarning")
def test_what_is_filled_otherwise_than_by_the_parent_stays() -> None:
    with safe_rope.guard():
        with torch.device("meta"):
            model = ByAMethod()
        model.part.inv_freq = torch.empty_like(model.part.inv_freq, device="cpu")
        model.part.inv_freq.copy_(torch.linspace(1.0, 0.25, 8))
    assert torch.equal(model.part.inv_freq, torch.linspace(1.0, 0.25, 8))
