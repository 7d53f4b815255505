from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from scan_examples import BAD, CALL, CLEAN, FIXED, INHERITED

from safe_rope.cli.main import cli
from safe_rope.scan import RULES


def test_only_fixable_rules_are_fixed(project: Path, scan) -> None:
    file = project / "a.py"
    file.write_text(BAD)
    for options in (("--unfixable", "SR001"), ("--fixable", "sr01")):
        assert scan("a.py", "--fix", *options).exit_code == 1
        assert file.read_text() == BAD
    assert scan("a.py", "--fix", "--fixable", "SR001", "--exit-non-zero-on-fix").exit_code == 1
    assert file.read_text() == FIXED
    assert scan("a.py", "--fix", "--exit-non-zero-on-fix").exit_code == 0


def test_fix_only_reports_nothing_that_is_left(project: Path, scan) -> None:
    file = project / "a.py"
    file.write_text(BAD + INHERITED)
    result = scan("a.py", "--fix-only")
    assert (result.exit_code, result.stdout) == (0, "")
    assert file.read_text() == FIXED + INHERITED


def test_the_report_goes_to_a_file(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    result = scan("a.py", "--output-format", "json", "--output-file", "report.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads((project / "report.json").read_text())["findings"][0]["rule"] == "SR001"


def test_formats_of_other_tools(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    (project / "b.py").write_text("x = (\n")
    (project / "c.py").write_text(CLEAN)
    options = ("a.py", "b.py", "c.py", "--select", "SR001", "--output-format")
    (line,) = scan(*options, "concise").stdout.splitlines()
    assert line.startswith("a.py:7:13: SR001 [*] arange in float32: ")
    broken, found = json.loads(scan(*options, "gitlab").stdout)
    assert broken["location"] == {"path": "b.py", "lines": {"begin": 1}}
    assert (found["check_name"], found["severity"]) == ("SR001", "major")
    assert found["location"] == {"path": "a.py", "lines": {"begin": 7}}
    assert found["fingerprint"] != broken["fingerprint"]
    suites = ElementTree.fromstring(scan(*options, "junit").stdout)
    assert {name: suites.get(name) for name in ("tests", "failures", "errors")} == {
        "tests": "2", "failures": "1", "errors": "1"
    }  # fmt: skip
    assert [case.get("classname") for case in suites.iter("testcase")] == ["a.py", "b.py"]
    (failure,) = suites.iter("failure")
    assert str(failure.get("message")).startswith("arange in float32")
    (case,) = ElementTree.fromstring(scan("c.py", "--format", "junit").stdout).iter("testcase")
    assert list(case) == []


def test_comments_are_written_that_silence(project: Path, scan, findings) -> None:
    many = f"t = {CALL}"
    lines = "t = torch.arange(\n            max_positions,\n            dtype=torch.float32,\n        )"
    sources = {
        "a.py": BAD,
        "b.py": BAD.replace(many, f"{many}  # noqa: E501 long"),
        "c.py": BAD.replace(many, lines).replace("\n", "\r\n"),
        "d.py": BAD.replace(many, f'{many}; s = """\n"""'),
    }
    for name, source in sources.items():
        (project / name).write_bytes(source.encode())
    result = scan(".", "--add-noqa")
    assert result.exit_code == 2
    assert "d.py: 1 of 1 findings cannot be silenced" in result.stderr
    assert [one["path"] for one in findings(".")] == ["d.py"]
    assert (project / "a.py").read_text() == BAD.replace(many, f"{many}  # noqa: SR001")
    assert "# noqa: E501, SR001 long" in (project / "b.py").read_text()
    assert (project / "c.py").read_bytes().count(b"\n") == (project / "c.py").read_bytes().count(b"\r\n")
    assert (project / "d.py").read_bytes() == sources["d.py"].encode()
    assert scan("a.py", "--add-noqa", "--fix").exit_code == 2


def test_a_file_that_no_comment_is_written_into_is_named(project: Path, scan) -> None:
    (project / "a.py").write_text("x = (\n")
    result = scan("a.py", "--add-noqa")
    assert result.exit_code == 2
    assert "error: a.py:1:5" in result.stderr


def test_a_comment_silences_a_whole_file(project: Path, findings) -> None:
    for comment, left in (
        ("# safe-rope: ignore-file", 0),
        ("# safe-rope: ignore-file[SR001] small", 0),
        ("# safe-rope: ignore-file[SR002]", 2),
        ("# safe-rope: ignore-files", 2),
    ):
        (project / "a.py").write_text(BAD + BAD + comment + "\n")
        assert len(findings("a.py")) == left, comment


def test_what_counts_and_what_is_scanned_can_be_shown(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    (project / "b.py").write_text(BAD)
    (project / "pyproject.toml").write_text('[tool.safe-rope]\nexclude = ["b.py"]\nselect = ["SR001"]\n')
    assert scan(".", "--show-files").stdout == "a.py\n"
    shown = scan(".", "--show-settings").stdout
    assert "select = ['SR001']" in shown
    assert "exclude = ['b.py']" in shown


def test_every_rule_is_explained_at_once() -> None:
    shown = CliRunner().invoke(cli, ["rule", "--all"]).stdout
    assert all(f"{rule.id} {rule.name} " in shown for rule in RULES.values())


@pytest.mark.parametrize(
    "options",
    [("--output-file", "a.py"), ("--output-file", "link"), ("--write-baseline", "--baseline", "pkg/../a.py")],
)
@pytest.mark.parametrize("path", ["a.py", "."])
def test_no_output_replaces_what_is_scanned(project: Path, scan, path: str, options: tuple[str, ...]) -> None:
    (project / "pkg").mkdir()
    (project / "a.py").write_text(BAD)
    (project / "link").symlink_to("a.py")
    result = scan(path, *options)
    assert result.exit_code == 2
    assert "that is a file to scan" in result.stderr
    assert (project / "a.py").read_text() == BAD
