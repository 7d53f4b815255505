from __future__ import annotations

import os
from pathlib import Path

import pytest
from scan_examples import BAD

from safe_rope.scan.run.settings import Settings, load_settings


def _settings(project: Path, text: str) -> None:
    (project / "pyproject.toml").write_text(f"[tool.safe-rope]\n{text}\n")


def _paths(found: list[dict[str, object]]) -> list[object]:
    return [item["path"] for item in found]


def test_select_and_ignore_of_the_file_count(project: Path, scan) -> None:
    (project / "bad.py").write_text(BAD)
    _settings(project, 'select = ["SR002"]')
    assert scan("bad.py").exit_code == 0
    _settings(project, 'select = ["SR001", "SR002"]\nignore = ["SR001"]')
    assert scan("bad.py").exit_code == 0
    _settings(project, 'select = ["SR001"]')
    assert scan("bad.py").exit_code == 1


def test_select_of_the_command_line_replaces_the_files(project: Path, scan) -> None:
    (project / "bad.py").write_text(BAD)
    _settings(project, 'select = ["SR002"]\nignore = ["SR001"]')
    assert scan("bad.py", "--select", "SR001").exit_code == 1
    _settings(project, 'select = ["SR001"]')
    assert scan("bad.py", "--ignore", "SR001").exit_code == 0


def test_exclude_and_per_file_ignores_are_relative_to_the_file(project: Path, monkeypatch, findings) -> None:
    for place in ("src/vendor", "tests/deep", "src/tests"):
        (project / place).mkdir(parents=True)
        (project / place / "m.py").write_text(BAD)
    (project / "setup.py").write_text(BAD)
    _settings(
        project, 'select = ["SR001"]\nexclude = ["vendor"]\nper-file-ignores = { "tests/**" = ["SR001"] }'
    )
    monkeypatch.chdir(project / "src")
    command = ("--format", "json")
    assert _paths_of(command, "..") == ["../setup.py", "../src/tests/m.py"]
    assert _paths_of(command, str(project / "tests")) == []
    assert _paths_of(command, "vendor/m.py") == []
    assert _paths_of(command, "tests/m.py") == ["tests/m.py"]


def _paths_of(options: tuple[str, ...], *paths: str) -> list[str]:
    import json

    from click.testing import CliRunner

    from safe_rope.cli.main import cli

    document = json.loads(CliRunner().invoke(cli, ["scan", *options, *paths]).stdout)
    assert document["errors"] == []
    return [item["path"] for item in document["findings"]]


def test_the_nearest_file_with_a_table_counts(project: Path, scan) -> None:
    (project / "a" / "b").mkdir(parents=True)
    (project / "a" / "b" / "m.py").write_text(BAD)
    _settings(project, 'ignore = ["SR001"]')
    (project / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert scan("a/b").exit_code == 0
    _settings(project / "a", "ignore = []")
    assert scan("a/b", "--ignore", "SR008").exit_code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('selct = ["SR001"]', "'select'"),
        ('per_file_ignores = { "a" = ["SR001"] }', "'per-file-ignores'"),
        ('select = ["SR1"]', "'SR001'"),
        ('ignore = ["E501"]', "E501"),
        ('per-file-ignores = { "a" = ["SR0003"] }', "'SR003'"),
        ('select = "SR001"', "list of strings"),
        ("exclude = [1]", "list of strings"),
        ("per-file-ignores = []", "table"),
        ('respect-gitignore = "no"', "true or false"),
        ('fixable = ["SR9"]', "fixable"),
        ("= broken", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_an_error_that_names_it(project: Path, scan, text: str, said: str) -> None:
    (project / "a.py").write_text("x = 1\n")
    _settings(project, text)
    result = scan("a.py")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "pyproject.toml" in result.stderr


def test_a_file_that_is_named_is_read_whatever_it_holds(project: Path, scan) -> None:
    (project / "a.py").write_text("x = 1\n")
    (project / "broken.toml").write_text('[project]\nname = "x\n')
    result = scan("a.py", "--config", "broken.toml")
    assert result.exit_code == 2
    assert "broken.toml: not valid TOML" in result.stderr


def test_tool_that_is_no_table_is_an_error(project: Path, scan) -> None:
    (project / "a.py").write_text("x = 1\n")
    (project / "pyproject.toml").write_text("tool = 3  # safe-rope\n")
    result = scan("a.py")
    assert result.exit_code == 2
    assert "[tool] must be a table, got 3" in result.stderr


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("vendor", "a/vendor/b.py", True),
        ("vendor", "a/vendored/b.py", False),
        ("*.py", "a/b/c.py", True),
        ("a/*.py", "a/b.py", True),
        ("a/*.py", "a/b/c.py", False),
        ("a/**/*.py", "a/c.py", True),
        ("a/**/*.py", "a/b/c/d.py", True),
        ("a/**", "a/b/c.py", True),
        ("a/", "a/b.py", True),
        ("./a/b.py", "a/b.py", True),
        ("a/b", "x/a/b/c.py", False),
        ("**/b.py", "b.py", True),
        ("test_?.py", "test_1.py", True),
        ("test_[!1].py", "test_1.py", False),
        ("a.b", "axb", False),
    ],
)
def test_patterns(project: Path, pattern: str, path: str, matches: bool) -> None:
    settings = Settings(os.getcwd(), frozenset(), exclude=(pattern,))
    assert settings.excludes(path) is matches


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({"select": ["sr01"]}, {"SR010", "SR011", "SR012", "SR013"}),
        ({"select": ["ALL"], "ignore": ["SR0"]}, set()),
        ({"select": ["ALL"], "ignore": ["SR"], "extend-select": ["SR003"]}, {"SR003"}),
        ({"select": ["SR01"], "ignore": ["SR012", "sr011"]}, {"SR010", "SR013"}),
        ({"select": ["SR001"], "ignore": ["SR001"]}, set()),
        ({"select": ["sr001"], "ignore": ["all"]}, {"SR001"}),
    ],
)
def test_the_longest_name_decides(project: Path, options: dict[str, list[str]], rules: set[str]) -> None:
    assert load_settings(".", options, isolated=True).rules == rules
    lines = "".join(f"{key} = {value!r}\n" for key, value in options.items())
    _settings(project, lines)
    assert load_settings(".").rules == rules


def test_each_file_has_the_settings_nearest_to_it(project: Path, findings, scan) -> None:
    for place in ("a", "a/b", "c"):
        (project / place).mkdir()
        (project / place / "m.py").write_text(BAD)
    _settings(project, 'exclude = ["c"]')
    _settings(project / "a" / "b", 'exclude = ["./m.py"]')
    assert _paths(findings(".")) == ["a/m.py"]
    assert _paths(findings(".", "--isolated")) == ["a/m.py", "a/b/m.py", "c/m.py"]
    assert _paths(findings(".", "--config", "a/b/pyproject.toml")) == ["a/m.py", "c/m.py"]
    assert scan(".", "--config", "none.toml").exit_code == 2


def test_exclude_of_the_command_line_replaces_or_extends(project: Path, findings) -> None:
    for place in ("a", "b", "c"):
        (project / place).mkdir()
        (project / place / "m.py").write_text(BAD)
    _settings(project, 'exclude = ["a"]\nextend-exclude = ["b"]')
    assert _paths(findings(".")) == ["c/m.py"]
    assert _paths(findings(".", "--exclude", "c,./b/*.py")) == ["a/m.py"]
    assert _paths(findings(".", "--extend-exclude", "c/m.py")) == []


def test_what_git_ignores_is_passed_over(project: Path, findings) -> None:
    ignored = ("out/m.py", "a/skip.py", "a/b/gone/m.py", "named/m.py")
    kept = ("a/keep.py", "a/out.py", "a/b/m.py")
    for path in (*ignored, *kept):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(BAD)
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("# made\n/out/\n*skip*\nkeep.py\n!a/keep.py\nnamed/\n")
    (project / "a" / ".gitignore").write_text("gone/\n")
    assert _paths(findings(".")) == sorted(kept, key=lambda path: (path.count("/"), path))
    assert _paths(findings("a")) == sorted(kept, key=lambda path: (path.count("/"), path))
    assert _paths(findings("named", "out/m.py")) == ["named/m.py", "out/m.py"]
    _settings(project, "respect-gitignore = false")
    assert set(_paths(findings("."))) == {*ignored, *kept}
