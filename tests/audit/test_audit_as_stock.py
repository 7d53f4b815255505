"""What a forward has shown to be as rounded as in stock is not ok; a mere cast of a table is undone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

DIM, ROWS = 64, 64


def sinusoids(rows: int) -> torch.Tensor:
    inverse = torch.exp(torch.arange(DIM // 2).float() * -0.2971)
    phases = torch.outer(torch.arange(rows).float(), inverse)
    return torch.cat((phases.sin(), phases.cos()), dim=1)


class CastsItsTable(nn.Module):
    """fairseq's: the table is an attribute, which goes where another tensor has gone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = sinusoids(ROWS)
        self.register_buffer("witness", torch.FloatTensor(1))

    def forward(self, length: int) -> torch.Tensor:
        if length > len(self.weights):
            self.weights = sinusoids(length)
        self.weights = self.weights.to(self.witness)
        return self.weights[:length]


def test_a_forward_that_casts_its_table_leaves_it_exact() -> None:
    with safe_rope.guard():
        model = nn.Sequential(CastsItsTable())
    model.to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        for length in (10, 40, 3 * ROWS, 10):
            answer = model(length)
            assert answer.dtype == torch.bfloat16
            assert torch.equal(answer, sinusoids(length).bfloat16())
            table = model[0].weights
            assert torch.equal(table, sinusoids(len(table)))
            assert safe_rope.audit(model).ok
    model.float()
    assert torch.equal(model(3 * ROWS), sinusoids(3 * ROWS))


class GrowsBesideAWeight(nn.Module):
    """With weights it is not run twice, and what it makes is as in the stock model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(DIM, DIM)
        self.rows = sinusoids(ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.rows):
            self.rows = sinusoids(x.shape[1]).to(x.dtype)
        return self.weight(x) + self.rows[: x.shape[1]].to(x.dtype)


def test_a_table_that_was_made_anew_in_16_bits_is_unknown_until_it_is_made_in_fp32() -> None:
    with safe_rope.guard():
        model = nn.Sequential(GrowsBesideAWeight())
    assert safe_rope.audit(model).ok
    model.to(torch.bfloat16)
    with pytest.warns(PrecisionWarning, match="made rows anew in torch.bfloat16"):
        model(torch.zeros(1, 2 * ROWS, DIM).bfloat16())
    report = safe_rope.audit(model)
    assert [(found.what, found.severity) for found in report.findings] == [("rows", "unknown")]
    assert "anew in 16 bits" in report.findings[0].source
    model.float()(torch.zeros(1, 3 * ROWS, DIM))
    assert torch.equal(model[0].rows, sinusoids(3 * ROWS))
    assert safe_rope.audit(model).ok, str(safe_rope.audit(model))


class Scaled(nn.Module):
    """funasr's: positions are counted in the dtype of the frequencies, beside a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, DIM, 2).float() / DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phases = torch.outer(torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq)
        return torch.cat((phases.sin(), phases.cos()), dim=-1) * self.scale


class InFP32(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phases = torch.arange(x.shape[1]).float()[:, None] * self.inv_freq
        return torch.cat((phases.sin(), phases.cos()), dim=-1) * self.scale


def test_phases_that_a_forward_has_rounded_are_not_ok() -> None:
    x = torch.zeros(1, 1500, DIM)
    model, exact = nn.Sequential(Scaled()), nn.Sequential(InFP32())
    true = model(x)
    for one in (model, exact):
        safe_rope.protect(one)
        one.to(torch.bfloat16)
    with pytest.warns(PrecisionWarning, match="before cos and sin"):
        assert (model(x.bfloat16()) - true).abs().max() > 1
    assert (exact(x.bfloat16()) - true).abs().max() < 1e-2
    report = safe_rope.audit(model)
    assert [(found.what, found.severity) for found in report.findings] == [("phases", "unknown")], str(report)
    assert safe_rope.audit(exact).ok


class ScaledBeside(nn.Module):
    """Counts in the dtype of what it is given, beside a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, DIM, 2).float() / DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).to(x.dtype)
        return (positions[:, None] * self.inv_freq.to(x.dtype) * self.scale).cos()


class KeepsItsFrequencies(ScaledBeside):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = self.inv_freq
        super()._apply(fn)
        self.inv_freq = kept
        return self


@pytest.mark.parametrize("cls", [ScaledBeside, KeepsItsFrequencies])
def test_counts_that_a_forward_has_rounded_are_not_ok(cls: type[ScaledBeside]) -> None:
    with safe_rope.guard():
        model = nn.Sequential(cls())
    model.bfloat16()
    x = torch.zeros(1, 600, DIM)
    with pytest.warns(PrecisionWarning, match="counted in torch.bfloat16"):
        answer = model(x.bfloat16())
    assert not torch.allclose(answer.float(), cls()(x), atol=0.1)
    assert safe_rope.audit(model).verdict == "unknown"


class Weighted(nn.Module):
    """Activations are multiplied by a list that rises, beside a wave of other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.frequency = 0.1
        self.register_buffer("pos_weight", torch.tensor([1 + 0.1 * i for i in range(DIM)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = (torch.arange(x.shape[1]).float() * self.frequency).sin()[:, None]
        return self.query(x) * self.pos_weight + wave.to(x.dtype)


class WeightedPhases(Weighted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.query(x) * self.pos_weight).sin() * self.frequency


class WeightedPhasesOfAProperty(Weighted):
    @property
    def weight(self) -> torch.Tensor:
        return self.pos_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.query(x) * self.weight).sin() + (x * self.frequency).sin()


@pytest.mark.parametrize("cls", [Weighted, WeightedPhases, WeightedPhasesOfAProperty])
def test_a_list_that_no_sines_are_taken_of_is_not_told_of(cls: type[Weighted]) -> None:
    with safe_rope.guard():
        model = nn.Sequential(cls())
    model.bfloat16()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        model(torch.randn(1, 20, DIM).bfloat16())
    assert [str(one.message).split()[0].rpartition(".")[2] for one in caught] == ["pos_weight"] * (
        cls is not Weighted
    )
    assert safe_rope.audit(model).verdict == ("ok" if cls is Weighted else "unknown")
