"""Forwards that keep nothing but a width are asked for activations of that width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audited import Model
from torch import nn

import safe_rope

DIM, LENGTH = 24, 300


class FromTheWidth(nn.Module):
    """Makes everything in its forward, which takes no other width."""

    low = False

    def __init__(self, dim: int = DIM, base: float = 1e4) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def speeds(self) -> torch.Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device).to(x.dtype if self.low else torch.float32)
        phases = places.float()[:, None] * self.speeds()
        return x * torch.cat((phases.cos(), phases.sin()), -1).to(x.dtype)


class CountsLow(FromTheWidth):
    low = True


class FromAList(FromTheWidth):
    def __init__(self, dim: int = DIM) -> None:
        nn.Module.__init__(self)
        self.listed = tuple(1e4 ** (-k / dim) for k in range(0, dim, 2))

    def speeds(self) -> torch.Tensor:
        return torch.tensor(self.listed)


class FromAListLow(FromAList):
    low = True


def off_by(part: Any) -> float:
    x = torch.ones(1, LENGTH, DIM)
    return float((part(x.bfloat16()).float() - part(x)).abs().max())


@pytest.mark.parametrize("style", [FromTheWidth, FromAList])
def test_right_ones_are_ok(style: type[nn.Module]) -> None:
    part = style()
    assert off_by(part) <= 2**-8
    report = safe_rope.audit(Model(part).bfloat16())
    assert report.ok, report


@pytest.mark.parametrize("style", [CountsLow, FromAListLow])
def test_rounded_counts_are_damage(style: type[nn.Module]) -> None:
    part = style()
    assert off_by(part) > 0.5
    (finding,) = safe_rope.audit(Model(part).bfloat16()).findings
    assert (finding.severity, finding.what, finding.where) == ("damaged", "forward", "forward")
    assert finding.cos_error is not None
    assert finding.cos_error > 0.5
