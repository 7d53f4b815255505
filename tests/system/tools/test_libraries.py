"""The survey of other libraries judges a rotary module whose truth is known, load path by load path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory.libraries import cell, judge
from laboratory.libraries.subject import Subject, floats
from torch import nn

BF16 = torch.bfloat16
LENGTH = 512


class Rotary(nn.Module):
    """Frequencies in a buffer, cos and sin in the dtype of what is rotated."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


class Model(nn.Module):
    """Weights besides."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(x)
        return self.proj(x * cos + x.flip(-1) * sin)


def rotary(build: Any = Rotary) -> Subject:
    return Subject("test", "Rotary", build, lambda m, to: m(to(floats(1, LENGTH, 16))))


def model() -> Subject:
    return Subject("test", "Model", Model, lambda m, to: m(to(floats(1, LENGTH, 8))), whole=True)


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    return tmp_path / "truth.pt"


@pytest.mark.parametrize("subject", [rotary(), model()], ids=["module", "whole model"])
@pytest.mark.parametrize(
    ("path", "damaged"),
    [
        ("plain FP32", False),
        (".to(bf16)", True),
        ("half and back", True),
        ("meta", True),
        ("default dtype", False),
    ],
)
def test_stock_is_right_or_damaged_as_the_load_path_is(
    subject: Subject, path: str, damaged: bool, truth: Path
) -> None:
    cell.find_truth(subject, truth)
    found = cell.measure(subject, path, None, truth, "fp32")
    assert bool(judge.problem(found, subject.whole)) == damaged


@pytest.mark.parametrize("path", ["plain FP32", ".to(bf16)", "half and back", "meta"])
def test_the_guard_is_right_where_stock_is_and_repairs_what_is_not(path: str, truth: Path) -> None:
    subject = rotary()
    cell.find_truth(subject, truth)
    stock = cell.measure(subject, path, None, truth, "fp32")
    guarded = cell.measure(subject, path, "guard", truth, "fp32")
    kind, reason = judge.kind_of(stock, guarded, subject.whole)
    assert kind == (judge.RIGHT if path == "plain FP32" else judge.REPAIRED), reason


def _measured(problem: str | None = None, dtype: str = "float32", **other: Any) -> dict[str, Any]:
    native = {"dtypes": [dtype], "problem": problem, "distance": 1.0 if problem else 0.0}
    plain = {"plain": {"problem": problem}} if problem else {}
    return {"tables": {}, "saved": {}, "named": [], "native": native, **plain, **other}


FAILED = _measured(native={"error": "no"}, plain={"error": "no"})


@pytest.mark.parametrize(
    ("stock", "mine", "kind"),
    [
        (_measured(), _measured(), judge.RIGHT),
        (_measured("off"), _measured(), judge.REPAIRED),
        (_measured("off"), _measured("off"), judge.SILENT),
        (_measured("off"), _measured("off", named=["it"]), judge.NAMED),
        (_measured(), _measured("off", named=["it"]), judge.HARMED),
        (_measured(), _measured(tables={"a": "off"}), judge.HARMED),
        (_measured(), FAILED, judge.BROKEN),
        (_measured(), {"build": "no"}, judge.BROKEN),
        (_measured("off"), {"build": "no"}, judge.BROKEN),
        ({"build": "no"}, {"build": "no"}, judge.BOTH_FAIL),
        (FAILED, FAILED, judge.BOTH_FAIL),
        ({"build": "no"}, _measured(), judge.ONLY_WITH),
        ({"build": "no"}, _measured("off"), judge.SILENT),
        (_measured(dtype="bfloat16"), _measured(), judge.DTYPES),
        (_measured(saved={"a": "bfloat16"}), _measured(saved={"a": "float32"}), judge.DTYPES),
        (_measured(saved={"a": "bfloat16"}), _measured(), judge.DTYPES),
    ],
)
def test_the_kind_of_a_cell(stock: dict[str, Any], mine: dict[str, Any], kind: str) -> None:
    assert judge.kind_of(stock, mine, whole=False)[0] == kind


def test_a_low_precision_table_may_be_rounded_once_and_an_fp32_one_not_at_all() -> None:
    true = torch.linspace(0.1, 1.0, 50)
    assert judge.roundings(true, true.to(BF16), 0.0) <= 0
    assert judge.roundings(true, true.clone(), 0.0) <= 0
    assert judge.roundings(true, true.to(BF16).float(), 0.0) > 0
    assert judge.roundings(true, torch.nextafter(true, 2 * true), 0.0) > 0
    assert judge.roundings(true, torch.nextafter(true, 2 * true), 2.0**-22) <= 0
    assert judge.roundings(true, (true.to(BF16).float() * 1.01).to(BF16), 0.0) > 0
