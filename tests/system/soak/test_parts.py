"""A few tries of parts of `tools/lab soak`, and what counts and compares them."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import pytest
from laboratory.soak import PARTS, read
from laboratory.soak.memory import slope
from laboratory.soak.page import page
from laboratory.soak.trial import Trial
from laboratory.upstream import compare
from laboratory.upstream import read as outcomes

SCALES = {"constructors": 0.0025, "threads": 0.01}


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", SCALES)
def test_nothing_fails(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module(f"laboratory.soak.{part}")
    monkeypatch.setattr(module, "set_aside", lambda: None, raising=False)
    trial = Trial(seed=2, scale=SCALES[part])
    gc.collect()  # a model that another test has left would end in the middle, and its functions with it
    module.run(trial)
    assert not [failure for entry in trial.kinds.values() for failure in entry["failures"]]
    assert all(kind["tries"] for kind in trial.kinds.values())


def test_every_part_is_a_module_that_runs() -> None:
    for name in PARTS:
        assert callable(importlib.import_module(f"laboratory.soak.{name}").run)


def test_a_failure_is_counted_kept_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(seed=0)
    for number in range(30):
        with trial.of("odd numbers", number):
            assert number % 2, "even"
    with pytest.raises(KeyboardInterrupt), trial.of("interrupted"):
        raise KeyboardInterrupt
    entry = trial.result()["kinds"]["odd numbers"]
    assert (entry["tries"], entry["failed"], len(entry["failures"])) == (30, 15, 15)
    assert entry["failures"][1].startswith("2: AssertionError: even")
    versions = dict.fromkeys(("torch", "transformers", "deepspeed"), "1")
    part = {**trial.result(), "seed": 0, "scale": 1, "date": "", "commit": "c", "versions": versions}
    assert "| odd numbers | 30 | 15 |" in page({"orders": part})
    capsys.readouterr()


def test_a_slope_is_that_of_a_line() -> None:
    assert slope([7]) == slope([3, 3, 3]) == 0
    assert slope([0, 10, 20, 30]) == pytest.approx(30)


def test_there_is_no_record_of_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json") == {}


def test_tests_whose_outcome_differs_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = '<testcase classname="a" name="{}">{}</testcase>'
    broken = '<failure message="1 is not 2&#10;more"/>'
    seen = {}
    for way, inner in (("without", ""), ("guarded", broken)):
        file = tmp_path / way
        file.write_text(f"<testsuite>{case.format('one', inner)}{case.format('two', '')}</testsuite>")
        seen[way] = outcomes(file)
    assert compare("suite", seen) == 1
    assert "    guarded: failure 1 is not 2\n" in capsys.readouterr().out
