"""The plot of an audit: a file in the format of its name, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from safe_rope._audit.command.job import Job
from safe_rope._audit.command.outcome import Outcome
from safe_rope._audit.command.plot import draw
from safe_rope._audit.report import AuditReport, MeasuredRow, ModuleAudit
from safe_rope.errors import UnsupportedModelError


def outcome(*errors: float) -> Outcome:
    rows = [MeasuredRow(10**i, error, error, error < 1e-6) for i, error in enumerate(errors)]
    module = ModuleAudit("rotary_emb", "a.Rotary", None, False, rows=rows)
    report = AuditReport("a.Model", 2.0**-20, modules=[module])
    job = Job("a model", {}, None, "bfloat16")
    audits = {"from_pretrained": {"stock": report, "guarded": report}}
    return Outcome(job, "llama", "default RoPE", 1000, 1, {"torch": "2"}, audits)


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
