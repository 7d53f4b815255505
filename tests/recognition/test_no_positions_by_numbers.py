"""Numbers that resemble those of positions and are none stay as in stock, and are ok to the audit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import safe_rope

ANGLES = (0.7, 2.1, 1.3, 0.4)


def turning(*angles: float) -> np.ndarray:
    return np.array([[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles])


def camera() -> np.ndarray:
    pose = np.eye(4)
    pose[:2, :2] = turning(0.7)[0]
    return pose


def cameras() -> np.ndarray:
    poses = np.stack([camera()] * len(ANGLES))
    poses[:, :2, :2] = turning(*ANGLES)
    return poses


def givens() -> np.ndarray:
    matrix = np.eye(8)
    for at, turn in enumerate(turning(*ANGLES)):
        matrix[2 * at : 2 * at + 2, 2 * at : 2 * at + 2] = turn
    return matrix


def wigner() -> np.ndarray:
    matrix = np.zeros((4, 4))
    for order in (1, 2):
        one, other = 2 - order, 1 + order
        matrix[[one, other], [one, other]] = math.cos(0.4 * order)
        matrix[one, other] = math.sin(0.4 * order)
        matrix[other, one] = -matrix[one, other]
    return matrix


def fourier(n: int = 64) -> np.ndarray:
    """The waves of a short-time Fourier transform, as a convolution has them: [waves, 1, samples]."""
    return (np.fft.fft(np.eye(n)).real[: n // 2 + 1] * np.hanning(n))[:, None]


def fourier_pairs(n: int = 32) -> np.ndarray:
    transform = np.fft.fft(np.eye(n))
    return np.stack((transform.real, transform.imag), 1)


def both_parts(n: int = 1024) -> np.ndarray:
    transform = np.fft.fft(np.eye(n))[: n // 2 + 1]
    return np.vstack((transform.real, transform.imag))[:, None]


def levels() -> np.ndarray:
    return np.stack([np.arange(16) * step for step in (1.7, 0.85, 0.425, 0.2125)], 1)


class Holds(nn.Module):
    def __init__(self, make: Callable[[], np.ndarray]) -> None:
        super().__init__()
        self.make = make
        self.register_buffer("held", torch.from_numpy(make().astype(np.float32)))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1] * self.held.reshape(-1)


class Weighs(nn.Module):
    """A loss that weighs classes, and counts rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.1, 0.2, 0.4, 0.8]))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])
        return -(self.weights[rows % 4] * x[rows, rows % 4]).sum() / self.weights.sum()


class Discounts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("powers", torch.tensor([1.0, 0.9, 0.81, 0.729]))

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., :4] * self.powers).cumsum(-1)


MADE = (camera, cameras, givens, wigner, fourier, fourier_pairs, both_parts, levels)


@pytest.mark.contract
@pytest.mark.parametrize("build", [*((lambda m=m: Holds(m)) for m in MADE), Weighs, Discounts])
def test_numbers_that_are_no_positions_stay_as_in_stock(build: Callable[[], nn.Module]) -> None:
    x = torch.linspace(-1, 1, 64, dtype=torch.bfloat16).reshape(4, 16)
    stock = nn.Sequential(build()).bfloat16()
    with safe_rope.guard() as session:
        model = nn.Sequential(build())
    model.bfloat16()
    assert not session.report.protected
    assert [one.dtype for one in model.buffers()] == [one.dtype for one in stock.buffers()]
    assert torch.equal(model(x), stock(x))
    report = safe_rope.audit(stock)
    assert report.verdict == "ok", str(report)


class Normalises(nn.Module):
    """Makes positions beside running statistics, of which one begins as rates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(16))
        self.register_buffer("spread", torch.ones(16))
        self.register_buffer("running_mean", torch.linspace(0.1, 1.7, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.centre.lerp_(x.mean(0), 0.1)
        self.spread.lerp_(x.var(0), 0.1)
        self.running_mean.lerp_(x.mean(0), 0.1)
        places = torch.arange(x.shape[0])[:, None].sin().to(x.dtype)
        return (x - self.centre) / self.spread.sqrt() + places + torch.cos(x * self.running_mean)


class Seen(nn.Module):
    """Counts, and holds what a parent has seen, which is no number before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.full((3, 16), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])[:, None].to(x.dtype)
        return x * self.last[0].nan_to_num() + rows


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.last[0] = x.mean(0)
        return self.seen(x)


class Masks(nn.Module):
    """Makes positions, and hides places behind a row of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((16,), -1e9))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(16)
        hidden = torch.where(places[:4, None] >= places, x.new_zeros(()), self.mask.to(x.dtype))
        return (x + hidden).softmax(-1) * torch.cos(x)


@pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")
@pytest.mark.parametrize("build", [Normalises, Sees, Masks])
def test_what_a_model_has_seen_and_hides_stays_as_in_stock(build: Callable[[], nn.Module]) -> None:
    x = torch.linspace(-1, 1, 64).reshape(4, 16).sin()
    trained = build()
    for model in (build(), trained, build().bfloat16()):
        if model is trained:
            model(x)
        report = safe_rope.audit(model)
        assert report.verdict == "ok", str(report)
    assert not safe_rope.protect(trained).unprotected
    true, stock = build(), build().bfloat16()
    with safe_rope.guard() as session:
        guarded = build()
    guarded.bfloat16()
    assert not session.report.unprotected
    assert not any(entry.tables for entry in session.report.protected)
    for _ in range(3):
        expected, low, kept = true(x), stock(x.bfloat16()), guarded(x.bfloat16())
        assert kept.dtype == low.dtype
        assert (kept - expected).abs().mean() <= (low - expected).abs().mean()
    assert [one.dtype for one in guarded.buffers()] == [one.dtype for one in stock.buffers()]
