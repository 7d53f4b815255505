"""A guarded layer whose phases meet 16-bit weights is not called right: compiled, or before a first call."""

from __future__ import annotations

import warnings

import pytest
import torch
from audited import Model
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning

WIDTH, LENGTH = 16, 1500


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        steps = torch.arange(0, WIDTH, 2).float() / WIDTH
        self.register_buffer("freqs", 10000.0**-steps, persistent=False)

    def phases(self, position_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        phases = self.phases(position_ids)
        one, other = self.q(x).chunk(2, -1)
        cos, sin = phases.cos(), phases.sin()
        return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


class Learned(_Layer):
    """Its positions are multiplied by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = nn.Parameter(torch.ones(1))

    def phases(self, position_ids: torch.Tensor) -> torch.Tensor:
        return (position_ids.to(self.pace.dtype) * self.pace)[..., None] * self.freqs


class Scaled(_Layer):
    """Its frequencies are scaled by a number: what is followed is exact."""

    def phases(self, position_ids: torch.Tensor) -> torch.Tensor:
        return position_ids[..., None] * (self.freqs * 0.5)


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, LENGTH * WIDTH).view(1, LENGTH, WIDTH)
    return x.to(torch.bfloat16).to(dtype), torch.arange(LENGTH)[None]


def _guarded(cls: type[nn.Module], *, compiles: bool = False) -> nn.Module:
    torch.manual_seed(0)
    with safe_rope.guard():
        part = cls()
        if compiles:
            part.compile(backend="eager")
        model = Model(part)
    return model.to(torch.bfloat16)


def _error(model: nn.Module, cls: type[nn.Module]) -> float:
    torch.manual_seed(0)
    true = cls()
    with torch.no_grad():
        for mine, other in zip(true.parameters(), model.part.parameters(), strict=True):
            mine.copy_(other)
        got, expected = model.part(*_inputs(torch.bfloat16)), true(*_inputs(torch.float32))
    return float((got - expected).abs().max() / expected.abs().max())


def test_phases_that_the_first_call_will_round_are_unknown_before_it() -> None:
    model = _guarded(Learned)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)  # nobody has called it yet
        report = safe_rope.audit(model)
    assert report.verdict == "unknown", str(report)
    with pytest.warns(PrecisionWarning, match="phases are rounded there"):
        assert _error(model, Learned) > 0.5
    assert safe_rope.audit(model).verdict == "unknown"


def test_phases_that_are_followed_are_ok_before_the_first_call() -> None:
    model = _guarded(Scaled)
    assert safe_rope.audit(model).ok
    assert _error(model, Scaled) < 0.02
    assert safe_rope.audit(model).ok


@pytest.mark.parametrize("when", ["the layer", "around the layer", "around the model"])
def test_frequencies_that_a_graph_rounds_are_unknown(when: str) -> None:
    model = _guarded(Scaled, compiles=when == "the layer")
    if when == "around the layer":
        model.part = torch.compile(model.part, backend="eager")
    if when == "around the model":
        model = torch.compile(model, backend="eager")
    (finding,) = safe_rope.audit(model).findings
    assert (finding.what, finding.severity) == ("freqs", "unknown")
    assert "in a graph" in finding.source


def test_a_graph_rounds_what_is_unknown() -> None:
    model = _guarded(Scaled, compiles=True)
    with pytest.warns(PrecisionWarning, match="in a graph"):
        assert _error(model, Scaled) > 0.05
    assert safe_rope.audit(model).verdict == "unknown"


def test_a_compiled_model_in_fp32_is_ok() -> None:
    with safe_rope.guard():
        model = Model(Scaled())
    assert safe_rope.audit(torch.compile(model, backend="eager")).ok
