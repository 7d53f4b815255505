from __future__ import annotations

import json
from pathlib import Path

import pytest
from scan_examples import BAD, CALL, FIXED

FILE = ("--baseline", "known.json")
ONLY = ("--select", "SR001")


def test_recorded_findings_are_not_reported_and_new_ones_are(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    assert scan(".", *ONLY, *FILE, "--write-baseline").exit_code == 0
    assert scan(".", *ONLY, *FILE).exit_code == 0
    (project / "b.py").write_text(BAD)
    result = scan(".", *ONLY, *FILE)
    assert result.exit_code == 1
    assert "b.py:7:13" in result.stdout
    assert "a.py" not in result.stdout


def test_a_finding_stays_known_when_its_line_moves_or_is_laid_out_anew(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    scan(".", *ONLY, *FILE, "--write-baseline")
    (project / "a.py").write_text("# more\n" * 50 + BAD)
    assert scan(".", *ONLY, *FILE).exit_code == 0
    (project / "a.py").write_text(BAD.replace("max_positions, dtype", "max_positions,\n            dtype"))
    assert scan(".", *ONLY, *FILE).exit_code == 0
    (project / "a.py").write_text(BAD.replace("t = " + CALL, f"t = 2 * {CALL} + 1  # more"))
    assert scan(".", *ONLY, *FILE).exit_code == 0
    (project / "a.py").write_text(BAD.replace("torch.arange(max", "torch.arange(1, max"))
    assert scan(".", *ONLY, *FILE).exit_code == 1


def test_as_many_are_known_as_were_recorded(project: Path, findings, scan) -> None:
    (project / "a.py").write_text(BAD)
    scan(".", *ONLY, *FILE, "--write-baseline")
    (project / "a.py").write_text(BAD + BAD)
    assert [found["line"] for found in findings(".", *FILE)] == [15]


def test_paths_are_relative_to_the_baseline(project: Path, monkeypatch, scan) -> None:
    (project / "src").mkdir()
    (project / "src" / "a.py").write_text(BAD)
    scan("src", *ONLY, *FILE, "--write-baseline")
    monkeypatch.chdir(project / "src")
    assert scan("a.py", *ONLY, "--baseline", "../known.json").exit_code == 0
    assert scan(str(project / "src"), *ONLY, "--baseline", "../known.json").exit_code == 0


def test_known_findings_are_not_fixed(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    scan(".", *ONLY, *FILE, "--write-baseline")
    (project / "b.py").write_text(BAD)
    assert scan(".", *ONLY, *FILE, "--fix").exit_code == 0
    assert (project / "a.py").read_text() == BAD
    assert (project / "b.py").read_text() == FIXED


def test_the_file_is_readable_sorted_and_the_same_each_time(project: Path, scan) -> None:
    for name in ("b.py", "a.py"):
        (project / name).write_text(BAD)
    scan(".", *ONLY, "--write-baseline")
    first = (project / ".safe-rope-baseline.json").read_text()
    document = json.loads(first)
    assert document["version"] == 1
    assert document["findings"] == [
        {"path": name, "rule": "SR001", "code": CALL, "count": 1} for name in ("a.py", "b.py")
    ]
    scan("b.py", "a.py", *ONLY, "--write-baseline")
    assert (project / ".safe-rope-baseline.json").read_text() == first


def test_a_file_that_cannot_be_scanned_is_still_an_error(project: Path, scan) -> None:
    (project / "a.py").write_text("x = (\n")
    assert scan(".", *FILE, "--write-baseline").exit_code == 2


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"version": 9, "findings": []}', '{"version": 1, "findings": [1]}']
)
def test_a_file_that_is_no_baseline_is_an_error(project: Path, scan, content: str) -> None:
    (project / "a.py").write_text(BAD)
    (project / "known.json").write_text(content)
    result = scan("a.py", *FILE)
    assert result.exit_code == 2
    assert "known.json" in result.stderr


def test_a_baseline_that_is_not_there_is_an_error(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    result = scan("a.py", *FILE)
    assert result.exit_code == 2
    assert "--write-baseline" in result.stderr
