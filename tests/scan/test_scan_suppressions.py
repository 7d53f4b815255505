from __future__ import annotations

from pathlib import Path

import pytest
from scan_examples import BAD, CALL


def _with(comment: str) -> str:
    return BAD.replace(CALL, f"{CALL}  {comment}")


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa: SR001",
        "# noqa: SR001 n is at most 64",
        "# noqa: SR001 - n is at most 64",
        "#noqa:SR001",
        "# NOQA : sr001",
        "# noqa: E501, SR001",
        "# noqa: E501,SR001 why",
        "# noqa: E501 SR001",
        "# noqa",
        "# noqa because",
        "# a reason first # noqa: SR001",
        "# safe-rope: ignore[SR001] n is at most 64",
        "# safe-rope: ignore[SR002, SR001]",
        "# safe-rope:ignore",
    ],
)
def test_a_comment_silences(project: Path, findings, comment: str) -> None:
    (project / "a.py").write_text(_with(comment))
    assert findings("a.py") == []


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa: SR002",
        "# noqa: E501",
        "# noqa: because it is fine",
        "# noqa: SR0011",
        "# safe-rope: ignore[SR002] SR001",
        "# safe-rope: ignore[]",
        "# qa",
        '; s = "# noqa: SR001"',
    ],
)
def test_another_comment_does_not(project: Path, findings, comment: str) -> None:
    (project / "a.py").write_text(_with(comment))
    assert len(findings("a.py")) == 1


@pytest.mark.parametrize("line", [0, 1, 2, 3])
def test_any_line_of_the_statement_counts(project: Path, findings, line: int) -> None:
    lines = ["t = torch.arange(", "    max_positions,", "    dtype=torch.float32,", ")"]
    lines[line] += "  # noqa: SR001"
    (project / "a.py").write_text(BAD.replace("t = " + CALL, "\n        ".join(lines)))
    assert findings("a.py") == []


def test_a_line_around_the_statement_does_not_count(project: Path, findings) -> None:
    for around in (
        f"# noqa: SR001\n        t = {CALL}",
        f"t = {CALL}\n        # noqa: SR001",
        f"u = 1  # noqa: SR001\n        t = {CALL}",
        f"t = {CALL}\n        u = 1  # noqa: SR001",
    ):
        (project / "a.py").write_text(BAD.replace("t = " + CALL, around))
        assert len(findings("a.py")) == 1


def test_unused_and_unknown_names_are_said_once_and_change_no_status(project: Path, scan) -> None:
    (project / "a.py").write_text(
        "x = 1  # noqa: SR001\ny = 2  # noqa: SR0003, E501\n"
        "z = 3  # safe-rope: ignore[SR012, E501] why\nw = 1  # noqa\n"
    )
    result = scan("a.py")
    assert result.exit_code == 0
    said = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(said) == 4
    assert said[0].startswith("warning: a.py:1:8: unused suppression: SR001")
    assert "SR0003; did you mean SR003?" in said[1]
    assert "unused suppression: SR012" in said[2]
    assert "E501" in said[3]
    assert scan("a.py", "--quiet").stderr == ""


def test_a_used_suppression_and_one_of_a_rule_that_is_off_are_not_unused(project: Path, scan) -> None:
    (project / "a.py").write_text(_with("# noqa: SR001, SR002"))
    assert "SR002" in scan("a.py").stderr
    assert "warning" not in scan("a.py", "--ignore", "SR002").stderr
    assert "warning" not in scan("a.py", "--select", "SR001").stderr


def test_suppressed_findings_are_not_fixed(project: Path, scan) -> None:
    source = _with("# noqa: SR001")
    (project / "a.py").write_text(source)
    assert scan("a.py", "--fix", "--select", "SR001").exit_code == 0
    assert (project / "a.py").read_text() == source


def test_carriage_returns_count_as_lines(project: Path, findings) -> None:
    (project / "a.py").write_bytes(_with("# noqa: SR001").replace("\n", "\r").encode())
    assert findings("a.py") == []
    (project / "a.py").write_bytes(_with("# noqa: SR002").replace("\n", "\r").encode())
    assert len(findings("a.py")) == 1
