"""Files that are imported inside of zero.Init keep its constructors: ``from torch import arange``."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zero_init import zero_init
from torch import Tensor

import safe_rope
from safe_rope.constructors import ConstructorGuard

pytestmark = [
    pytest.mark.usefixtures("deepspeed_group"),
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::safe_rope.PrecisionWarning"),
]
DIM, LENGTH = 32, 600
BF16, FP32 = torch.bfloat16, torch.float32
ONE_ROUNDING = 2.0**-9
"""Of BF16 at 1: what a stock forward returns in BF16 stays in BF16."""
SOURCE = """
import torch
from torch import arange, cat, float32, nn, ones, outer, tensor

class Rotary(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        rates = 10000.0 ** -(arange(0, dim, 2, dtype=float32) / dim)
        self.register_buffer("inv_freq", rates, persistent=False)
    def forward(self, x):
        phases = outer(arange(x.shape[1], dtype=float32), self.inv_freq)
        phases = cat((phases, phases), -1)
        return phases.cos(), phases.sin()

class Sinusoids(nn.Module):
    def __init__(self, dim=32, length=600):
        super().__init__()
        rates = 10000.0 ** -(arange(0, dim, 2, dtype=float32) / dim)
        phases = outer(arange(length, dtype=float32), rates)
        self.register_buffer("pe", cat((phases.sin(), phases.cos()), -1), persistent=False)
    def forward(self, x):
        return self.pe[: x.shape[1]]

class Slopes(nn.Module):
    def __init__(self, heads=12):
        super().__init__()
        slopes = tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)], dtype=float32)
        self.register_buffer("slopes", slopes, persistent=False)
    def forward(self, x):
        return self.slopes

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.sinusoids, self.alibi = Rotary(), Sinusoids(), Slopes()
        self.scale = nn.Parameter(ones(32, dtype=float32))
    def forward(self, x):
        return (*self.rotary(x), self.sinusoids(x), self.alibi(x))
"""
X = torch.zeros(1, LENGTH, DIM)
_numbers = itertools.count()


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Imports the file anew, wherever it is called."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def run() -> Any:
        names.append(f"positions_{next(_numbers)}")
        (tmp_path / f"{names[-1]}.py").write_text(SOURCE)
        importlib.invalidate_caches()
        return importlib.import_module(names[-1])

    yield run
    for name in names:
        del sys.modules[name]


def error(answers: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    return max(float((one.float() - other).abs().max()) for one, other in zip(answers, truth, strict=True))


@pytest.mark.parametrize("inside", [False, True], ids=["guard around", "guard inside"])
def test_what_is_imported_under_a_guard_keeps_an_explicit_dtype(
    importing: Callable[[], Any], inside: bool
) -> None:
    truth = importing().Model()(X)
    contexts = (zero_init(), safe_rope.guard()) if inside else (safe_rope.guard(), zero_init())
    with contexts[0], contexts[1]:
        file = importing()
        model = file.Model()
    assert error(model(X), truth) <= ONE_ROUNDING
    assert safe_rope.audit(model).ok
    assert error(file.Model()(X), truth) == 0
    assert file.ones(2).dtype == BF16  # without a dtype it gives what it would have given
    with zero_init():
        assert file.ones(2, dtype=FP32).dtype == BF16
        with safe_rope.guard():
            assert file.ones(2, dtype=FP32).dtype == FP32
            assert torch.nn.Parameter(file.ones(2, dtype=FP32)).dtype == BF16
    assert file.ones(2, dtype=FP32).dtype == FP32


def test_a_forward_that_was_imported_under_a_guard_compiles_whole(importing: Callable[[], Any]) -> None:
    truth = importing().Model()(X)
    with ConstructorGuard(), zero_init():
        file = importing()
    compiled = torch.compile(file.Rotary(), backend="eager", fullgraph=True)
    assert error(compiled(X), truth[:2]) == 0


def test_tables_of_what_was_imported_without_a_guard_are_told_and_repaired(
    importing: Callable[[], Any],
) -> None:
    truth = importing().Model()
    with zero_init():
        file = importing()
        built = file.Model()
    verdicts = {one.path: one.verdict for one in safe_rope.audit(built).modules}
    assert verdicts == dict.fromkeys(("rotary", "sinusoids", "alibi"), "damaged")
    with safe_rope.guard() as session:
        later = file.Model()
    for model, report in ((built, safe_rope.protect(built)), (later, session.report)):
        buffers = dict(model.named_buffers())
        for name, true in truth.named_buffers():
            assert torch.equal(buffers[name], true), name
        assert error(model(X)[2:], truth(X)[2:]) <= ONE_ROUNDING
        # What forward makes stays rounded, and is named.
        assert error(model(X)[:2], truth(X)[:2]) > 0.9
        assert [one.path for one in report.unprotected] == ["rotary"]
        assert "imported inside of zero.Init" in (report.unprotected[0].reason or "")
        verdicts = {one.path: one.verdict for one in safe_rope.audit(model).modules}
        assert verdicts == {"rotary": "unknown", "sinusoids": "ok", "alibi": "ok"}


def test_tables_are_judged_rightly_where_ondevice_was_open_at_the_import(
    importing: Callable[[], Any],
) -> None:
    from deepspeed import OnDevice

    with OnDevice(dtype=BF16, device="meta"):
        file = importing()
    assert file.ones(2, dtype=FP32).is_meta
    assert safe_rope.audit(file.Sinusoids()).ok
