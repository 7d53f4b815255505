from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest
from scan_examples import BAD, CLEAN, COMMAND, environment

import safe_rope.scan
from safe_rope.scan.engine.finding import decode, encode
from safe_rope.scan.run import cache as cache_module
from safe_rope.scan.run import runner
from safe_rope.scan.run.cache import Cache, key, open_cache
from safe_rope.scan.run.one_file import scan_source


def _file(project: Path) -> Path:
    (file,) = (project.parent / "cache" / "safe-rope").iterdir()
    return file


@pytest.fixture
def analyzed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were analyzed, not taken from the cache."""
    seen: list[str] = []
    scan_file = runner.scan_file

    def watch(path: str) -> runner.Keyed:
        seen.append(path)
        return scan_file(path)

    monkeypatch.setattr(runner, "scan_file", watch)
    return seen


def test_a_second_scan_analyzes_only_what_changed(project: Path, scan, analyzed: list[str]) -> None:
    (project / "a.py").write_text(BAD + "# noqa: SR012\n")
    (project / "b.py").write_text(CLEAN)
    (project / "c.py").write_text("x = (\n")
    first = scan(".", "--format", "json")
    assert sorted(analyzed) == ["a.py", "b.py", "c.py"]
    analyzed.clear()
    second = scan(".", "--format", "json")
    assert analyzed == []
    assert (second.stdout, second.stderr, second.exit_code) == (first.stdout, first.stderr, first.exit_code)
    os.utime(project / "a.py", (1, 1))
    (project / "b.py").write_text(BAD)
    scan(".")
    assert analyzed == ["b.py"]


def test_the_same_size_and_time_with_other_content_is_analyzed(
    project: Path, scan, analyzed: list[str]
) -> None:
    (project / "a.py").write_text("x = 1\n")
    os.utime(project / "a.py", (1, 1))
    scan(".")
    (project / "a.py").write_text("x = (\n")
    os.utime(project / "a.py", (1, 1))
    assert scan(".").exit_code == 2
    assert analyzed == ["a.py", "a.py"]


def test_selection_is_not_part_of_what_is_remembered(project: Path, scan, analyzed: list[str]) -> None:
    (project / "a.py").write_text(BAD)
    assert scan(".", "--select", "SR002").exit_code == 0
    analyzed.clear()
    assert scan(".", "--select", "SR001").exit_code == 1
    assert analyzed == []


def test_no_cache_neither_reads_nor_writes(project: Path, scan, analyzed: list[str]) -> None:
    (project / "a.py").write_text(BAD)
    scan(".", "--no-cache")
    assert not (project.parent / "cache").exists()
    scan(".")
    scan(".", "--no-cache")
    assert analyzed == ["a.py"] * 3


@pytest.mark.parametrize("content", [b"", b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_cache_is_ignored_and_made_anew(
    project: Path, scan, analyzed: list[str], content: bytes
) -> None:
    (project / "a.py").write_text(BAD)
    scan(".")
    _file(project).write_bytes(content)
    assert scan(".").exit_code == 1
    analyzed.clear()
    assert scan(".").exit_code == 1
    assert analyzed == []


@pytest.mark.parametrize("data", ["", "nonsense", "[]", "[1, 2, 3, 4]", '{"a": 1}', "[[[1]], [], null, []]"])
def test_a_damaged_entry_is_ignored(project: Path, scan, data: str) -> None:
    import sqlite3

    (project / "a.py").write_text(BAD)
    first = scan(".", "--format", "json")
    with sqlite3.connect(_file(project)) as connection:
        connection.execute("UPDATE results SET data = ?", (data,))
    connection.close()
    assert scan(".", "--format", "json").stdout == first.stdout


def test_another_version_of_the_scanner_has_another_file(project: Path, monkeypatch) -> None:
    result = scan_source(BAD.encode(), "a.py")
    name = key(BAD.encode(), "a.py")
    for number in ("1", "2"):
        monkeypatch.setattr(cache_module, "version", lambda number=number: number)
        cache = open_cache()
        assert cache.get(name, "a.py") is None
        cache.put([(name, result)])
        assert cache.get(name, "a.py") == result
        cache.close()


PACKAGE = Path(safe_rope.scan.__file__).parent
SOURCES = [file.relative_to(PACKAGE) for file in sorted(PACKAGE.rglob("*.py"))]


def test_every_source_of_the_scanner_changes_the_version_in_whichever_folder(tmp_path: Path) -> None:
    assert {file.parent.name for file in SOURCES} >= {"rules", "formats"}
    copy = tmp_path / "scan"
    for file in SOURCES:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes((PACKAGE / file).read_bytes())
    known = cache_module.version.__wrapped__
    versions = {known(copy)}
    assert versions == {cache_module.version()}
    for file in SOURCES:
        with (copy / file).open("a") as opened:
            opened.write("#\n")
        versions.add(known(copy))
    (copy / "deep" / "down").mkdir(parents=True)
    (copy / SOURCES[-1]).rename(copy / "deep" / "down" / "moved.py")
    versions.add(known(copy))
    assert len(versions) == len(SOURCES) + 2


def test_without_sources_to_tell_versions_by_nothing_is_remembered(project: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "version", functools.partial(cache_module.version, project))
    cache = open_cache()
    cache.put([(key(b"", "a.py"), scan_source(b"", "a.py"))])
    assert cache.empty
    assert not (project.parent / "cache").exists()


def test_everything_of_a_result_survives_the_cache() -> None:
    source = BAD + "x = 1  # noqa: SR001\ny = 2  # safe-rope: ignore\n"
    header = "# automatically generated from src/modular_a.py.\n"
    for text in (source, header + source, CLEAN, "x = (\n"):
        result = scan_source(text.encode(), "modeling_a.py")
        assert decode("modeling_a.py", encode(result)) == result


def test_the_oldest_entries_go_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_ENTRIES", 10)
    cache = Cache(project / "c.sqlite3")
    names = [(key(b"", str(number)), str(number)) for number in range(25)]
    for name, path in names:
        cache.put([(name, scan_source(b"", path))])
    left = [path for name, path in names if cache.get(name, path) is not None]
    assert left == [str(number) for number in range(15, 25)]


def test_many_runs_at_once_agree(project: Path) -> None:
    for number in range(40):
        (project / f"m{number}.py").write_text(BAD + f"# {number}\n")
    command = [*COMMAND, "scan", ".", "-q", "--select", "SR001"]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        for _ in range(4)
    ]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert {run.returncode for run in runs} == {1}
    assert len(set(outputs)) == 1
    assert outputs[0][1] == b""
    assert outputs[0][0].count(b"SR001 error") == 40


def test_a_cache_directory_that_cannot_be_made_is_done_without(project: Path, scan, monkeypatch) -> None:
    (project / "a.py").write_text(BAD)
    (project / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "file"))
    assert scan("a.py").exit_code == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(project / "home"))
    assert scan("a.py").exit_code == 1
    assert (project / "home" / ".cache" / "safe-rope").is_dir()
    assert not (project / "relative").exists()
