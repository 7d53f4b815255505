"""Whatever a module's own code raises, the audit goes on, and measures the rest."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support.own_rotary import Rotary
from torch import Tensor, nn

import safe_rope

BF16, DIM = torch.bfloat16, 32


class Exits(Rotary):
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        sys.exit(3)


class EndsAGenerator(Rotary):
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        raise GeneratorExit


class Recurs(Rotary):
    def forward(self, x: Tensor) -> Tensor:
        return self.forward(x * 1).cos()


@pytest.mark.parametrize("cls", [Exits, EndsAGenerator, Recurs])
def test_a_forward_that_raises_ends_no_audit(cls: type[Rotary]) -> None:
    for dtype in (torch.float32, BF16):
        model = nn.Sequential(nn.Linear(4, 4), cls(), Rotary()).to(dtype)
        found = {one.path: one.severity for one in safe_rope.audit(model).findings if one.severity != "note"}
        assert found == ({} if dtype == torch.float32 else {"1": "damaged", "2": "damaged"})


def test_a_module_that_raises_on_a_look_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def tables(*_: Any) -> Any:
        raise GeneratorExit("none of yours")

    monkeypatch.setattr("safe_rope._audit.module.held_tables", tables)
    report = safe_rope.audit(nn.Sequential(Rotary()))
    assert report.verdict == "unknown"
    assert "GeneratorExit: none of yours" in str(report)


def test_answers_that_are_no_numbers_are_not_right() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Rotary(base=0.0))
    answers = model[1](torch.zeros(1), torch.arange(4)[None])
    assert bool(answers[0].isnan().any())
    (finding,) = safe_rope.audit(model).findings
    assert (finding.path, finding.what, finding.severity) == ("1", "forward", "unknown")


class NoNumberAtZero(Rotary):
    """sin(x) / x, which the first position has no number for."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        cos, sin = super().forward(x, position_ids)
        return cos, sin / position_ids[..., None]


def test_one_position_without_a_number_leaves_the_others_right() -> None:
    model = nn.Sequential(nn.Linear(4, 4), NoNumberAtZero())
    answers = model[1](torch.zeros(1), torch.arange(4)[None])
    assert bool(answers[1].isnan().any())
    assert safe_rope.audit(model).ok


def test_ctrl_c_ends_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rotary, "forward", lambda self, x, position_ids: forward())
    with pytest.raises(KeyboardInterrupt):
        safe_rope.audit(nn.Sequential(Rotary()))


def test_a_view_that_autograd_follows_is_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Rotary()).to(BF16)
    model[1].scale = model[0].weight.view(-1)
    assert safe_rope.audit(model).verdict == "damaged"
