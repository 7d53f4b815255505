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
