"""In a graph, other modules read what a guarded child computes its positions from, in the dtype of stock."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import safe_rope

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::safe_rope.PrecisionWarning"),  # of what is rounded in a graph
    pytest.mark.torch,
]
WIDTH, LENGTH = 32, 900


def frequencies(base: float) -> torch.Tensor:
    return 1 / base ** (torch.arange(0, WIDTH, 2) / WIDTH)


def waves(positions: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.outer(positions, of).cos().repeat(1, 2)


class Own(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH) if weights else nn.Identity()
        self.register_buffer("inv_freq", frequencies(1e4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) * waves(torch.arange(1.0 * LENGTH), self.inv_freq.float()).to(x.dtype)  # type: ignore[no-any-return]


class Reads(nn.Module):
    """It has weights, or a child that has, and no table."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.rope = Own(weights)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = (self.rope.inv_freq * 3).cos().repeat(2)
        return self.out(x * scaled) + self.rope(x)  # type: ignore[no-any-return]


class HasFrequencies(nn.Module):
    """What it makes of both in the dtype of its child's is positions in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Own(weights=False)
        self.register_buffer("inv_freq", frequencies(500), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH).to(self.rope.inv_freq.dtype)
        beside = waves(torch.arange(1.0 * LENGTH), self.inv_freq.float())
        return x * (waves(positions, self.rope.inv_freq) * beside).to(x.dtype)


@pytest.mark.parametrize("weights", [True, False])
def test_a_parent_with_weights_runs_in_a_graph_after_a_cast(weights: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, LENGTH, WIDTH)
    with safe_rope.guard():
        model = Reads(weights)
    true = model(x).detach()
    model.to(torch.bfloat16)
    found = torch.compile(model, backend="eager", fullgraph=True)(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found.float() - true).abs().max() < 0.05


def test_a_parent_that_makes_positions_computes_from_exact_frequencies_in_a_graph() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, LENGTH, WIDTH)
    with safe_rope.guard():
        model = nn.Sequential(HasFrequencies())
    true = model(x)
    model.to(torch.bfloat16)
    found = torch.compile(model, backend="eager", fullgraph=True)(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found.float() - true).abs().max() < 0.05
