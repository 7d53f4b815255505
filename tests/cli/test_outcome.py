"""The audit of all load paths: its verdict, and its plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from safe_rope._audit.command.job import Job
from safe_rope._audit.command.outcome import Outcome
from safe_rope._audit.command.plot import draw
from safe_rope._audit.report import AuditReport, MeasuredRow, ModuleAudit, Verdict
from safe_rope.errors import UnsupportedModelError


def outcome(*errors: float, judged: tuple[str, ...] = (), **verdicts: Verdict) -> Outcome:
    """One rotary module on each load path; ``verdicts``: of its stock form, by the path's name."""
    rows = [MeasuredRow(10**i, error, error, error < 1e-6) for i, error in enumerate(errors)]
    audits = {}
    for path, verdict in (verdicts or {"load": "ok"}).items():
        audits[path] = {
            kind: AuditReport(
                "a.Model", 2.0**-20, modules=[ModuleAudit("rope", "a.Rope", None, False, found, rows=rows)]
            )
            for kind, found in (("stock", verdict), ("guarded", "ok"))
        }
    job = Job("a model", {}, None, "bfloat16", judged=judged)
    return Outcome(job, "llama", "default RoPE", 1000, 1, {"torch": "2"}, audits)


@pytest.mark.parametrize(
    ("judged", "verdict", "said"),
    [
        ((), "damaged", "AFFECTED on 1 of 3 ways to load this model (cast)."),
        (("plain",), "ok", "NOT AFFECTED on any of 1 ways to load this model."),
        (("odd", "plain"), "unknown", "UNKNOWN on 1 of 2 ways to load this model (odd)."),
    ],
)
def test_the_report_begins_with_a_verdict_on_what_is_judged(
    judged: tuple[str, ...], verdict: str, said: str
) -> None:
    found = outcome(1e-3, judged=judged, plain="ok", cast="damaged", odd="unknown")
    assert found.verdict(guarded=False) == verdict
    assert found.text().startswith(f"{said} With the guard: ok.\n\na model: llama")
    assert found.to_dict()["ok"] == (verdict == "ok")
    assert len(found.to_dict()["paths"]) == 3


def test_what_was_not_measured_is_named() -> None:
    found = outcome(plain="ok")
    found.left_out = ["vision_config of llava, beside its text model"]
    said = "not measured: vision_config of llava, beside its text model; audit the model live"
    assert said in found.text().replace("\n    ", " ")
    assert found.to_dict()["left_out"] == found.left_out


def test_a_path_on_which_a_model_cannot_be_loaded_is_unknown_not_ok() -> None:
    found = outcome(plain="ok")
    found.failed = {"zero.Init": "zero.Init (stock): TypeError: no"}
    assert found.verdict(guarded=False) == "unknown"
    said = "CANNOT BE LOADED by what is installed on 1 of 2 ways; NOT AFFECTED on the others (zero.Init)."
    assert found.text().replace("\n", " ").startswith(said)
    assert "not measured, as the model cannot be loaded so: zero.Init (stock): TypeError" in found.text()
    found.job = replace(found.job, judged=("plain",))
    assert found.verdict(guarded=False) == "ok"


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")], ids=str
)
def test_the_name_says_the_format(suffix: str, begins: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"out{suffix}"
    draw(outcome(0.0, 1e-3, float("inf")), target)
    assert target.read_bytes().startswith(begins)
    assert list(tmp_path.iterdir()) == [target]


def test_a_plot_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing was measured"):
        draw(outcome(), tmp_path / "out.png")
    assert not list(tmp_path.iterdir())
