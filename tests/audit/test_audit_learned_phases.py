"""Sines of counts times trained weights: nobody can say how they are meant, and rounded ones are not ok."""

from __future__ import annotations

import pytest
import torch
from audited import Model
from torch import Tensor, nn

import safe_rope

BF16, FP32 = torch.bfloat16, torch.float32
DIM, ROWS = 64, 600


def exponents() -> Tensor:
    return torch.arange(0, DIM, 2) / DIM


class Learned(nn.Module):
    """Counts, and multiplies by what is trained, in FP32 or in the dtype of what it is given."""

    wide = False

    def kind(self, x: Tensor) -> torch.dtype:
        return FP32 if self.wide else x.dtype

    def frequencies(self, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(x.shape[1], device=x.device, dtype=self.kind(x))
        phases = counts[:, None] * self.frequencies(self.kind(x))
        return x + torch.cat((phases.sin(), phases.cos()), -1).to(x.dtype)


class LearnedBase(Learned):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.full((DIM // 2,), 1e4))

    def frequencies(self, dtype: torch.dtype) -> Tensor:
        return self.base.to(dtype) ** -exponents().to(dtype)


class LearnedFrequencies(Learned):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1e4 ** -exponents())

    def frequencies(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


class OfSomeTurns(Learned):
    """Phases of few turns, which 16 bits round as any numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, DIM // 2))

    def forward(self, x: Tensor) -> Tensor:
        phases = torch.arange(x.shape[1], device=x.device)[:, None] / x.shape[1] * self.weight.to(x.dtype)
        return x + torch.cat((phases.sin(), phases.cos()), -1).to(x.dtype)


def off(part: Learned) -> float:
    """How far a layer is off that of the same rounded weights in FP32."""
    x, low = torch.zeros(1, ROWS, DIM), Model(part).to(BF16).part
    with torch.no_grad():
        found = low(x.to(BF16)).float()
        return float((found - low.float()(x)).abs().max())


def made(cls: type[Learned], *, wide: bool) -> Learned:
    return type(cls.__name__, (cls,), {"wide": wide, "__module__": __name__})()


@pytest.mark.parametrize("cls", [LearnedBase, LearnedFrequencies])
def test_rounded_phases_of_trained_weights_are_unknown(cls: type[Learned]) -> None:
    assert off(made(cls, wide=False)) > 1.0
    report = safe_rope.audit(Model(made(cls, wide=False)).to(BF16))
    (finding,) = report.findings
    assert (finding.what, finding.severity) == ("forward", "unknown")


@pytest.mark.parametrize("cls", [LearnedBase, LearnedFrequencies])
def test_phases_of_trained_weights_in_fp32_are_ok(cls: type[Learned]) -> None:
    assert off(made(cls, wide=True)) < 0.01
    assert safe_rope.audit(Model(made(cls, wide=True)).to(BF16)).ok
    assert safe_rope.audit(Model(made(cls, wide=False))).ok


def test_few_turns_of_trained_weights_are_ok() -> None:
    assert off(made(OfSomeTurns, wide=False)) < 0.02
    assert safe_rope.audit(Model(made(OfSomeTurns, wide=False)).to(BF16)).ok
