"""What is computed from activations keeps its gradient and the stock dtype; phases handed out stay exact.

The truth is the unguarded module in FP32, or float64.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
from support.guarded import guarded
from torch import nn

import safe_rope

DIM, LENGTH = 16, 300
POSITIONS = torch.arange(LENGTH)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        self.register_buffer("inv_freq", rates, persistent=False)


class TurnsByAnExponential(Frequencies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = torch.exp(1j * POSITIONS[:, None].float() * self.inv_freq)
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns
        return torch.view_as_real(z).flatten(-2).to(x.dtype)


class TurnsParts(Frequencies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = (1j * POSITIONS[:, None].float() * self.inv_freq).exp()
        z = torch.complex(*x.float().unflatten(-1, (-1, 2)).unbind(-1)) * turns
        return torch.stack([z.real, z.imag], -1).flatten(-2).to(x.dtype)


class Decays(nn.Module):
    """As RetNet's: of x, one number for each channel and position."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("decay", torch.log(1 - 2 ** (-5.0 - torch.arange(DIM))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[1])[:, None]
        return (x.float() * torch.exp(steps * self.decay)).to(x.dtype)


class Subtracts(Frequencies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() - (POSITIONS[:, None] * self.inv_freq).repeat(1, 2)).to(x.dtype)


class Phases(Frequencies):
    """Of x, the dtype and the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(x[0, :, :1])
        return (POSITIONS[:, None].type_as(x) + zero) * self.inv_freq.to(x)


class PhasesOfPoints(Frequencies):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points[..., None] * self.inv_freq


CHANGES = (TurnsByAnExponential, TurnsParts, Decays, Subtracts)
WAYS = ("eager", "graph")


def of(module: nn.Module, x: torch.Tensor, way: str = "eager") -> list[torch.Tensor]:
    """What ``module`` makes of x, and the gradient for x."""
    x = x.clone().requires_grad_()
    y = (torch.compile(module, backend="aot_eager", fullgraph=True) if way == "graph" else module)(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return [y.detach(), x.grad]


def activations() -> torch.Tensor:
    return torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("make", CHANGES)
def test_activations_are_rounded_once_and_have_their_gradient(make: Any, how: str, way: str) -> None:
    x = activations()
    module, true = guarded(make, how).bfloat16(), of(make(), x.float())
    for _ in range(2):
        for got, expected in zip(of(module, x, way), true, strict=True):
            assert type(got) is torch.Tensor
            assert torch.equal(got, expected.bfloat16())


@pytest.mark.parametrize("make", CHANGES)
def test_without_gradients_they_are_plain_tensors_too(make: Any) -> None:
    y = guarded(make, "guard").bfloat16()(activations())
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert type(y) is torch.Tensor
    assert y.dtype == torch.bfloat16
    assert torch.equal(torch.load(file, weights_only=True), y)
    assert torch.equal(y, make()(activations().float()).bfloat16())


def test_phases_that_a_module_hands_out_stay_exact() -> None:
    phases = guarded(Phases, "guard").bfloat16()(activations())
    true = POSITIONS[:, None].double() * Phases().inv_freq
    assert phases.dtype == torch.bfloat16
    assert (phases.cos().double() - true.cos()).abs().max() < 2**-8


def test_phases_of_predicted_points_are_exact_or_have_their_gradient_and_are_told_of() -> None:
    points = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)).mul(100).bfloat16()
    module, true = guarded(PhasesOfPoints, "guard").bfloat16(), of(PhasesOfPoints(), points.float())
    exact = module(points)
    assert (exact.cos().double() - true[0].double().cos()).abs().max() < 2**-8
    with pytest.warns(safe_rope.PrecisionWarning, match="gradient"):
        got = of(module, points)
    stock = of(PhasesOfPoints().bfloat16(), points)
    for mine, theirs, expected in zip(got, stock, true, strict=True):
        assert (mine.float() - expected).abs().max() <= (theirs.float() - expected).abs().max()
    assert not safe_rope.audit(module).ok
    with warnings.catch_warnings():
        warnings.simplefilter("error", safe_rope.PrecisionWarning)
        of(module, points)


class ScalesPositions(Frequencies):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phases = (POSITIONS.float() * self.log_scale.float().exp())[:, None] * self.inv_freq
        return phases.cos()


@pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")
def test_a_trained_scale_of_positions_leaves_phases_exact_with_and_without_gradients() -> None:
    module, true, x = guarded(ScalesPositions, "guard").bfloat16(), ScalesPositions(), activations()
    for one in (module, true):
        one(x).sum().backward()
    with torch.no_grad():
        assert torch.equal(module(x), true(x))
    assert torch.equal(module(x), true(x))
    assert torch.equal(module.log_scale.grad, true.log_scale.grad.bfloat16())  # type: ignore[union-attr,operator]
    assert safe_rope.audit(module).ok
