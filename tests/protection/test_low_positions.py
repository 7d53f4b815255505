"""Phases of positions that come in 16 bits are exact; what is made of activations and counts is no phase."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safe_rope

BF16 = torch.bfloat16


def frequencies(width: int = 16) -> Tensor:
    return 10000.0 ** (-torch.arange(0, width, 2).float() / width)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freq", torch.stack([frequencies(4)] * 3), persistent=False)

    def forward(self, t: Tensor) -> Any:
        return t.to(self.freq.dtype) @ self.freq


class Expanded(Module):
    def forward(self, t: Tensor) -> Any:
        return t[0, :, None].expand(-1, 8) * self.inv_freq


class AndMore(Module):
    """A second result has no more numbers than the positions."""

    def forward(self, t: Tensor) -> Any:
        return t[..., None] * self.inv_freq, t / t.shape[-1]


class LastFrames(Module):
    def forward(self, t: Tensor) -> Any:
        return t[:, -8:, None] * self.inv_freq


class CountsMask(Module):
    def forward(self, mask: Tensor) -> Any:
        positions = mask.float()[:, 0, -1].cumsum(-1) - 1
        return (positions[..., None] * self.inv_freq).to(mask.dtype)


class LooksForNaN(Module):
    def forward(self, x: Tensor) -> Any:
        counts = torch.arange(x.shape[1]).float()[None]
        positions = torch.where(x[..., 0].isnan(), 0.0, counts)
        return (positions[..., None] * self.inv_freq).to(x.dtype)


class Broadcast(Module):
    def forward(self, x: Tensor) -> Any:
        counts = torch.arange(x.shape[1]).float()[None, :, None]
        positions, _ = torch.broadcast_tensors(counts, x[..., :1])
        return (positions * self.inv_freq).to(x.dtype)


STAMPS = torch.arange(40)[None] * 0.5 + 100  # BF16 has each of them
CASES: list[tuple[type[nn.Module], Tensor]] = [
    (Points, torch.arange(150).view(50, 3).float()),
    (Expanded, STAMPS),
    (AndMore, STAMPS),
    (LastFrames, torch.arange(200)[None].float()),
    (CountsMask, torch.ones(1, 1, 200, 200)),
    (LooksForNaN, torch.zeros(1, 300, 64)),
    (Broadcast, torch.zeros(1, 300, 64)),
]


def first(results: Any) -> Tensor:
    one: Tensor = results[0] if isinstance(results, tuple) else results
    return one


@pytest.mark.parametrize(("cls", "given"), CASES)
@pytest.mark.filterwarnings("ignore::safe_rope.errors.PrecisionWarning")  # positions in 16 bits
def test_phases_of_positions_in_16_bits_are_exact(cls: type[nn.Module], given: Tensor) -> None:
    true = first(cls()(given)).cos()
    with safe_rope.guard():
        guarded = cls()
    got = first(guarded.to(BF16)(given.to(BF16))).cos().float()
    assert (first(cls().to(BF16)(given.to(BF16))).cos().float() - true).abs().max() > 0.05
    assert (got - true).abs().max() <= 2**-8


class Decays(Module):
    def forward(self, scores: Tensor) -> Any:
        distance = torch.arange(scores.shape[-1])
        return (scores.float() * torch.exp(-distance * self.inv_freq[1])).to(scores.dtype)


class Shifts(Module):
    def forward(self, x: Tensor) -> Any:
        return (x.float() - torch.arange(x.shape[-2])[:, None] * self.inv_freq).to(x.dtype)


class Spreads(Module):
    """What is given has fewer numbers than what is returned."""

    def forward(self, x: Tensor) -> Any:
        return (x.float() - torch.arange(40)[:, None] * self.inv_freq).to(x.dtype)


@pytest.mark.parametrize(("cls", "shape"), [(Decays, (2, 40)), (Shifts, (2, 40, 8)), (Spreads, (2, 1, 8))])
def test_activations_that_meet_counts_are_rounded_once(cls: type[nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16)
    with safe_rope.guard():
        guarded = cls()
    got = guarded.to(BF16)(x)
    assert type(got) is Tensor
    assert torch.equal(got, cls()(x))


# ---- phases for another module -------------------------------------------------------------------------


class Products(nn.Module):
    """Counts nothing, takes no sines, and was given what it holds."""

    def __init__(self, rates: Tensor) -> None:
        super().__init__()
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        return t[:, None] * self.rates


class SinesOf(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.angles = Products(scale * frequencies(32))

    def forward(self, t: Tensor) -> Tensor:
        phase = self.angles(t)
        return torch.cat((phase.sin(), phase.cos()), -1)


@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("way", ["guard", "protect"])
def test_products_that_another_module_takes_sines_of_are_exact(scale: float, way: str) -> None:
    t = torch.arange(5000)
    true = SinesOf(scale)(t)
    stock = SinesOf(scale).to(BF16)
    assert (stock(t).float() - true).abs().max() > 1
    assert not safe_rope.audit(stock).ok
    with safe_rope.guard() if way == "guard" else contextlib.nullcontext():
        module = SinesOf(scale)
    if way == "protect":
        safe_rope.protect(module)
    given = module.to(BF16)(t)
    assert given.dtype == BF16
    assert (given.float() - true).abs().max() <= 2**-8
    assert safe_rope.audit(module).verdict == ("ok" if way == "guard" else "unknown")


def test_slopes_that_a_module_multiplies_meet_scores_as_in_stock() -> None:
    slopes, scores = 2.0 ** -torch.arange(1, 9).float(), torch.ones(40, 8, dtype=BF16)
    with safe_rope.guard():
        module = Products(slopes)
    given = module.to(BF16)(torch.arange(40)) + scores
    assert given.dtype == BF16
    assert torch.equal(given, Products(slopes).to(BF16)(torch.arange(40)) + scores)
