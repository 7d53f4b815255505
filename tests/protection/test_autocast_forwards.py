"""Forwards that make phases by matrix products, called under torch.autocast: eagerly and in a graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import safe_rope
from safe_rope.errors import PrecisionWarning

LENGTH = 600


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Product(nn.Module):
    """Cos of phases that ``@`` makes."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1], device=x.device).float()
        return (t[:, None] @ self.inv_freq[None].float()).cos().to(x.dtype)


class ByLinear(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1], device=x.device).float()
        return F.linear(t[:, None], self.inv_freq[:, None].float()).cos().to(x.dtype)


class Weighted(Product):
    """The same in a layer that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * super().forward(x)


def _true(dtype: torch.dtype) -> torch.Tensor:
    inv_freq = Product().inv_freq.double()
    return (torch.arange(LENGTH).double()[:, None] * inv_freq).cos().to(dtype).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cls", [Product, ByLinear])
@pytest.mark.contract
def test_autocast_does_not_round_phases(cls: type[nn.Module], compiled: bool, dtype: torch.dtype) -> None:
    with safe_rope.guard():
        module: Any = cls()
    called = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    x = torch.zeros(1, LENGTH, 32, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cos = called(x)
        stock = cls()(x)
    assert cos.dtype == stock.dtype == dtype
    low = torch.finfo(torch.bfloat16).eps
    assert (stock.double() - _true(dtype)).abs().max() > 0.5
    # What stock gives there is BF16 values; phases of 600 radians are off by 3e-5 in FP32.
    assert (cos.double() - _true(dtype)).abs().max() < (low if dtype == torch.bfloat16 else 2 * low)


class WeightedByLinear(ByLinear):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * super().forward(x)


@pytest.mark.parametrize("cls", [Weighted, WeightedByLinear])
def test_a_layer_with_weights_is_named_once(cls: type[nn.Module]) -> None:
    with safe_rope.guard():
        module = cls()
    x = torch.zeros(1, LENGTH, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(x)
        assert not caught
        with torch.autocast("cpu", torch.bfloat16):
            module(x)
            module(x)
    said = [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]
    assert len(said) == 1
    assert f"{cls.__name__} multiplies its frequencies by a matrix product" in said[0]


class PhasesIntoALayer(nn.Module):
    """A layer of weights takes what is counted, beside an elementwise phase: that is its ordinary code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", Product().inv_freq.clone())
        self.q = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.arange(x.shape[1])[:, None] * self.inv_freq.float()
        return self.q(self.inv_freq.expand(1, 16).to(x.dtype)) + F.linear(phase.cos(), self.q.weight)


def test_what_goes_into_a_layer_of_weights_is_not_named() -> None:
    with safe_rope.guard():
        module = PhasesIntoALayer()
    with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("always")
        given = module(torch.zeros(1, LENGTH, 32))
    assert not caught
    with torch.autocast("cpu", torch.bfloat16):
        stock = PhasesIntoALayer()
        stock.load_state_dict(module.state_dict())
        assert torch.equal(given, stock(torch.zeros(1, LENGTH, 32)))


def test_attention_without_phases_by_products_is_not_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(32, 32)
            self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            phase = torch.arange(x.shape[1]).float()[:, None] * self.inv_freq
            q = self.q(x) * torch.cat((phase.cos(), phase.sin()), -1)
            return torch.softmax(q @ q.transpose(1, 2), -1) @ x

    with safe_rope.guard():
        module = Attention()
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        module(torch.zeros(1, 8, 32))
