"""Frequencies that a forward makes at its first call: they stay None until then, whoever makes them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import safe_rope

IDS = torch.arange(48)[None]
X = torch.randn(1, 48, 32, generator=torch.Generator().manual_seed(0))


class Lazy(nn.Module):
    """Frequencies in a buffer that is None until the first call."""

    base = 10_000.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", None, persistent=False)
        self.ready = False

    def build(self) -> None:
        self.inv_freq = 1.0 / self.base ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
        self.ready = True

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.build()
        phases = position_ids[..., None].float() * self.inv_freq.float()
        return torch.cat((phases.cos(), phases.sin()), dim=-1).to(x.dtype)


class LazyAttribute(Lazy):
    """The same in an attribute."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.inv_freq = None
        self.ready = False

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.inv_freq is None:
            self.build()
        return super().forward(x, position_ids)


class LazyTable(nn.Module):
    """Cos and sin in buffers that are None until the first call, beside frequencies."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.cos is None:
            phases = torch.outer(torch.arange(64, device=x.device).float(), self.inv_freq)
            self.cos, self.sin = phases.cos(), phases.sin()
        return torch.cat((self.cos[position_ids], self.sin[position_ids]), dim=-1).to(x.dtype)


def _protected(cls: type[nn.Module]) -> nn.Module:
    with safe_rope.guard():
        module = cls()
    assert vars(module).get("inv_freq", module._buffers.get("inv_freq")) is None or cls is LazyTable
    return module


def _cast(module: nn.Module) -> nn.Module:
    return module.bfloat16()


def _copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]


def _transformed(module: nn.Module) -> nn.Module:
    torch.func.vmap(lambda x: module(x, IDS[0]))(X)
    return module


def _differentiated(module: nn.Module) -> nn.Module:
    torch.func.grad(lambda x: (module(x, IDS) * x).sum())(X)
    return module


def _transformed_in_bf16(module: nn.Module) -> nn.Module:
    module.bfloat16()
    torch.func.vmap(lambda x: module(x, IDS[0]))(X.bfloat16())
    return module.float()


def _exported(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    for strict in (False, True):
        found = torch.export.export(copied, (X, IDS), strict=strict).module()(X, IDS)
        assert torch.equal(found, LazyAttribute()(X, IDS))
        copied = copy.deepcopy(module)
    return module


AFTER: list[Callable[[nn.Module], nn.Module]] = [_cast, _copied, _pickled]


@pytest.mark.parametrize("cls", [Lazy, LazyAttribute])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_what_somebody_else_makes_before_the_first_call_is_kept(
    cls: type[Lazy], after: Callable[[nn.Module], nn.Module], base: float
) -> None:
    stock = cls()
    module = _protected(cls)
    for one in (stock, module):
        one.base = base
        one.build()
    module = after(module)
    assert torch.equal(module(X, IDS), stock(X, IDS))


@pytest.mark.parametrize(
    ("before", "cls"),
    [
        (_transformed, Lazy),
        (_differentiated, Lazy),
        (_transformed_in_bf16, Lazy),
        (_transformed, LazyAttribute),
        (_differentiated, LazyAttribute),
        (_exported, LazyAttribute),
    ],
)
def test_a_first_call_under_a_transform_leaves_a_module_that_runs(
    before: Callable[[nn.Module], nn.Module], cls: type[Lazy]
) -> None:
    module = before(_protected(cls))
    for _ in range(2):
        assert torch.equal(module(X, IDS), cls()(X, IDS))
        module.bfloat16()


def test_tables_may_be_made_in_inference_mode() -> None:
    module = _protected(LazyTable)
    with torch.inference_mode():
        assert torch.equal(module(X, IDS), LazyTable()(X, IDS))
    for _ in range(2):
        assert torch.equal(module(X, IDS), LazyTable()(X, IDS))
        module.bfloat16()


class LazyUntilItIsThere(Lazy):
    """No flag says whether the buffer has been made."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.inv_freq is None:
            self.build()
        phases = position_ids[..., None].float() * self.inv_freq.float()
        return torch.cat((phases.cos(), phases.sin()), dim=-1).to(x.dtype)


def test_a_first_call_under_vmap_leaves_what_stock_keeps() -> None:
    stock = LazyUntilItIsThere()
    with safe_rope.guard():
        module = LazyUntilItIsThere()
    for one in (module, stock):
        one.bfloat16()
        torch.func.vmap(lambda x, one=one: one(x, IDS[0]))(X.bfloat16())
    assert torch.equal(module.inv_freq, stock.inv_freq)  # type: ignore[arg-type]
    assert torch.equal(module(X, IDS), stock(X, IDS))
