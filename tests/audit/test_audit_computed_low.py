"""What a forward computes in low precision is damaged, whatever its tables hold; FP32 arithmetic is ok."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

BF16, FP32 = torch.bfloat16, torch.float32
DIM, LENGTH = 64, 600


def frequencies(dtype: torch.dtype = FP32) -> torch.Tensor:
    return 1.0 / 1e4 ** (torch.arange(0, DIM, 2, dtype=dtype) / DIM)


class Exponents(nn.Module):
    """Keeps k / dim, which BF16 holds exactly, and takes its exponential."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("exponents", torch.arange(0, DIM, 2).float() / DIM, persistent=False)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> Any:
        exponents = self.exponents.float() if self.wide else self.exponents
        phases = pos[..., None].float() * torch.exp(-math.log(1e4) * exponents)
        return phases.cos(), phases.sin()


class ExponentsInFP32(Exponents):
    wide = True


class Cached(nn.Module):
    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("dummy", torch.zeros(()), persistent=False)

    @functools.cached_property
    def inv_freq(self) -> torch.Tensor:
        return frequencies(FP32 if self.wide else self.dummy.dtype)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        phases = pos[..., None].to(self.inv_freq.dtype) * self.inv_freq
        return x + torch.cat((phases.cos(), phases.sin()), -1).to(x.dtype)


class CachedInFP32(Cached):
    wide = True


class Grid(nn.Module):
    """DETR's: sines of a grid, in a dtype that it is given."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.features = 16

    def forward(self, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        within = FP32 if self.wide else dtype
        rows = torch.arange(1, shape[-1] + 1, dtype=within, device=device)
        rows = rows / (rows[-1] + 1e-6) * 2 * math.pi
        phases = rows[:, None] / 1e4 ** (
            torch.arange(self.features, device=device).to(within) / self.features
        )
        return torch.stack((phases.sin(), phases.cos()), -1).to(dtype)


class GridInFP32(Grid):
    wide = True


class Model(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.weight = part, nn.Linear(2, 2)


@pytest.mark.parametrize("cls", [Exponents, Cached, Grid])
def test_low_arithmetic_is_damaged(cls: type[nn.Module]) -> None:
    assert safe_rope.audit(Model(cls()).to(BF16)).verdict == "damaged"
    with safe_rope.guard():
        guarded = Model(cls())
    assert safe_rope.audit(guarded.to(BF16)).ok


@pytest.mark.parametrize("cls", [ExponentsInFP32, CachedInFP32, GridInFP32])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_fp32_arithmetic_is_ok(cls: type[nn.Module], dtype: torch.dtype) -> None:
    assert safe_rope.audit(Model(cls()).to(dtype)).ok


def test_what_a_cached_property_has_kept_is_known() -> None:
    model = Model(CachedInFP32())
    model.part(torch.zeros(1, LENGTH, DIM), torch.arange(LENGTH)[None])
    assert safe_rope.audit(model).ok


class Turn:
    @staticmethod
    def apply(held: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return waves(pos[..., None].to(held["inv"].dtype) * held["inv"])


def waves(phases: torch.Tensor) -> torch.Tensor:
    return torch.cat((phases.cos(), phases.sin()), -1)


class HandedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        frozen = nn.Parameter(frequencies(), requires_grad=False)
        self.params = nn.ParameterDict({"inv": frozen})

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return Turn.apply(self.params, x, pos)


def test_frozen_frequencies_that_another_class_turns_are_damaged() -> None:
    assert safe_rope.audit(HandedOn()).ok
    assert safe_rope.audit(HandedOn().to(BF16)).verdict == "damaged"


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", frequencies(), persistent=False)

    def __call__(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return waves(pos[..., None].to(self.freqs.dtype) * self.freqs).to(x.dtype)


def test_a_class_that_is_called_and_has_no_forward_computes_in_fp32() -> None:
    x, pos = torch.zeros(1, LENGTH, DIM), torch.arange(LENGTH)[None]
    true = Called()(x, pos)
    with safe_rope.guard():
        model = Called()
    model.to(BF16)
    assert torch.equal(model(x.to(BF16), pos), true.to(BF16))
    assert safe_rope.audit(model).ok


class PositionsFirst(nn.Module):
    """Its forward takes positions and nothing else, as XGLM's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 32, 2).float() / 32))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        phase = position_ids[..., None].float() * self.inv_freq
        return torch.cat((phase.cos(), phase.sin()), -1)


class ByLengthOfInput(nn.Module):
    """It counts by the length of its input, and takes positions in an odd shape, as PegasusX's."""

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(inputs.shape[1], device=inputs.device)[:, None]
        if position_ids.shape[-1] != 1:
            raise RuntimeError("positions are a column")
        inv_freq = torch.exp(torch.arange(16, device=inputs.device).type_as(inputs) * -0.6)
        return torch.sin(position_ids * inv_freq)


@pytest.mark.parametrize("cls", [PositionsFirst, ByLengthOfInput])
@pytest.mark.parametrize("how", ["FP32", "BF16", "guarded"])
def test_positions_are_given_as_a_forward_takes_them(cls: type[nn.Module], how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), cls())
    if how == "guarded":
        with safe_rope.guard():
            model = nn.Sequential(nn.Linear(4, 4), cls())
    report = safe_rope.audit(model if how == "FP32" else model.to(torch.bfloat16))
    assert report.ok == (how != "BF16")
    assert "multiple values" not in str(report)
