"""Tables of a constructor that ran with float64 as the default dtype are nearer to the truth, and right."""

from __future__ import annotations

import math

import pytest
import torch
from audited import Model
from support.default_dtype import default_dtype
from torch import nn

import safe_rope

DIM, LENGTH = 64, 5000


class Sinusoids(nn.Module):
    """As in most tutorials: no dtype is named."""

    def __init__(self, dim: int = DIM, length: int = LENGTH) -> None:
        super().__init__()
        positions = torch.arange(length).unsqueeze(1)
        steps = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table = torch.zeros(length, dim)
        table[:, 0::2] = torch.sin(positions * steps)
        table[:, 1::2] = torch.cos(positions * steps)
        self.register_buffer("pe", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[: x.shape[1]]


class Cosines(nn.Module):
    """DCT: in FP32 off by less than a table that is given up as another formula's."""

    def __init__(self, length: int = 64, count: int = 32) -> None:
        super().__init__()
        places = torch.arange(length)[:, None] + 0.5
        self.register_buffer("basis", torch.cos(math.pi / length * places * torch.arange(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.basis


class Phasors(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LENGTH) -> None:
        super().__init__()
        speeds = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
        phases = torch.outer(torch.arange(length) * 1.0, speeds)
        self.cis = torch.polar(torch.ones_like(phases), phases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.cis[: x.shape[1]]).flatten(-2)


class Frozen(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LENGTH) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(length) * 1.0, 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))
        self.pos = nn.Parameter(torch.cat((phases.sin(), phases.cos()), -1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pos[: x.shape[1]]


STYLES = [Sinusoids, Cosines, Phasors, Frozen]


def built_in_float64(style: type[nn.Module]) -> nn.Module:
    with default_dtype(torch.float64):
        return Model(style())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("is_narrowed", [False, True])
def test_tables_built_in_float64_are_right(style: type[nn.Module], is_narrowed: bool) -> None:
    model = built_in_float64(style)
    report = safe_rope.audit(model.float() if is_narrowed else model)
    assert [(one.path, one.verdict) for one in report.modules] == [("part", "ok")], report


@pytest.mark.parametrize("style", [Sinusoids, Cosines])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_cast_of_them_is_damage(style: type[nn.Module], low: torch.dtype) -> None:
    report = safe_rope.audit(built_in_float64(style).to(low))
    assert [(one.severity, one.where) for one in report.findings] == [("damaged", "module cast")], report


def test_a_frozen_parameter_of_them_may_have_the_models_dtype() -> None:
    assert safe_rope.audit(built_in_float64(Frozen).bfloat16()).ok


@pytest.mark.parametrize("style", STYLES)
def test_other_numbers_in_float64_are_not_right(style: type[nn.Module]) -> None:
    model = built_in_float64(style)
    part = model.part
    own = [part.cis] if style is Phasors else [*part.buffers(), *part.parameters()]
    for held in own:
        held.data.mul_(1.0001)
    assert not safe_rope.audit(model).ok
