from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import pty
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from scan_examples import BAD, CLEAN, FIXED, environment, run_process

from safe_rope.scan.engine import Finding, reading
from safe_rope.scan.run import one_file, runner
from safe_rope.scan.run.cache import Cache

BROKEN = {
    "syntax": b"import torch\ntorch.arange(3, dtype=torch.float32\n",
    "indent": b"def f():\nx = torch.arange(1)\n",
    "latin-1 without declaration": b"x = 'caf\xe9'  # torch.arange\n",
    "unknown encoding": b"# coding: no-such-codec\nx = 1\n",
    "bom and another encoding": b"\xef\xbb\xbf# coding: latin-1\nx = 1\n",
    "utf-16": "import torch\n".encode("utf-16"),
    "null bytes": b"import torch\n\0torch.arange(3)\n",
    "parentheses": b"x = " + b"(" * 5000 + b"torch.arange(3)" + b")" * 5000,
    "attributes": b"import torch\nx = torch.arange(3)" + b".x" * 20_000 + b"\n",
    "operators": b"import torch\nx = torch.arange(3)" + b" + 1" * 20_000 + b"\n",
    "unary": b"import torch\nx = " + b"-" * 20_000 + b"torch.arange(3)\n",
    "blocks": b"import torch\n"
    + b"".join(b" " * n + b"if x:\n" for n in range(150))
    + b" " * 150
    + b"torch.arange(n, dtype=torch.float32)\n",
    "binary": bytes(range(256)) * 50 + b"torch.arange(",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_file_that_cannot_be_analyzed_is_one_diagnostic_and_stops_nothing(
    project: Path, scan, name: str, jobs: str
) -> None:
    (project / "b.py").write_bytes(BROKEN[name])
    for other in ("a.py", "c.py"):
        (project / other).write_text(BAD)
    result = scan(".", "--format", "json", "--select", "SR001", "--quiet", "--jobs", jobs)
    document = json.loads(result.stdout)
    assert [found["path"] for found in document["findings"]] == ["a.py", "c.py"]
    lines = result.stderr.splitlines()
    if name in ("attributes", "operators", "unary") and not lines:
        assert result.exit_code == 1  # a Python whose parser takes it
        return
    assert result.exit_code == 2
    (line,) = lines
    assert line.startswith("error: b.py:")
    assert "internal error" not in line
    assert [error["path"] for error in document["errors"]] == ["b.py"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"# only a comment",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbfimport torch\n",
        "# coding: latin-1\nx = 'é'\n".encode("latin-1"),
        "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nx = '€'\n".encode("cp1252"),
        b"x = '\\d'  # invalid escape\ntorch.arange\n",
        b"\x0c\nx = 1\r\ny = 2\rz = 3\n",
    ],
)
def test_unusual_files_are_clean(project: Path, scan, content: bytes) -> None:
    (project / "a.py").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = scan("a.py", "-q", "--jobs", "1")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("encoding", ["idna", "utf-7", "unicode_escape", "punycode", "undefined", "hex"])
def test_an_odd_encoding_neither_ends_the_run_nor_is_edited_wrongly(
    project: Path, scan, encoding: str
) -> None:
    odd = f"# coding: {encoding}\n{BAD}".encode()
    (project / "a.py").write_bytes(odd)
    (project / "b.py").write_text(BAD)
    result = scan(".", "--fix", "--select", "SR001", "--format", "json")
    assert "internal error" not in result.stderr
    document = json.loads(result.stdout or "{}")
    told = [*document.get("findings", ()), *document.get("errors", ())]
    assert {item["path"] for item in told} <= {"a.py"}
    assert (project / "b.py").read_text() == FIXED
    fixed = (project / "a.py").read_bytes()
    assert fixed == odd or fixed.decode(encoding) == odd.decode(encoding).replace(BAD, FIXED)


def test_whatever_goes_wrong_with_one_file_is_its_diagnostic(project: Path, scan, monkeypatch) -> None:
    found = one_file.analyze

    def broken(data: bytes, path: str) -> list[Finding]:
        if path == "a.py":
            raise RuntimeError("unforeseen")
        return found(data, path)

    monkeypatch.setattr(one_file, "analyze", broken)
    for name in ("a.py", "b.py"):
        (project / name).write_text(BAD)
    result = scan(".", "--jobs", "1", "--select", "SR001", "--quiet")
    assert result.exit_code == 2
    assert result.stderr == "error: a.py: internal error, please report it: RuntimeError: unforeseen\n"
    assert "b.py:7" in result.stdout


def test_a_lone_carriage_return_among_line_feeds_hides_nothing(project: Path, findings) -> None:
    (project / "a.py").write_bytes(b'import torch\nx = 1\ry = """a\rb"""\n' + BAD.encode())
    (found,) = findings("a.py")
    assert found["line"] == 4 + 7
    (project / "a.py").write_bytes(b"x = 1\ry = 2\n" + b"z = 3\n" * 900 + BAD.encode())
    (found,) = findings("a.py")
    assert found["line"] == 902 + 7


@pytest.mark.parametrize("method", ["", "    def width(self, size: int = 8):\n        return size * f(3)\n"])
def test_the_trees_of_a_file_go_without_a_collector(method: str) -> None:
    source = (
        f"import torch\ndef f(n: int):\n    return torch.arange(0, n, 2) / n\nclass C:\n    n = 3\n{method}"
    )

    def trees() -> int:
        return sum(isinstance(one, ast.AST) for one in gc.get_objects())

    one_file.scan_source(source.encode(), "model.py")
    gc.collect()
    before = trees()
    gc.disable()
    try:
        one_file.scan_source(source.encode(), "model.py")
        assert trees() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("statements", "count"),
    [
        ("def f{0}(n, d):\n    return torch.arange(n, dtype=torch.float32) / d\n", 500),
        (
            "class C{0}:\n    def f{0}(self, n):\n"
            "        return torch.arange(n, dtype=torch.float32) / self.x\n",
            500,
        ),
        ("t = torch.arange(n, dtype=torch.float32)\nu = t / 7\n", 125),
        ("t = torch.arange(n, dtype=torch.float32)\n", 1000),
        pytest.param("t{0} = torch.arange(n, dtype=torch.float32)\n", 3500, marks=pytest.mark.slow),
        ("t = torch.arange(n)\nu = t / 7\n", 700),
        ("torch.arange(n, dtype=torch.float32), ", 1000),
    ],
)
def test_the_time_is_linear_in_the_functions_and_findings_of_a_file(statements: str, count: int) -> None:
    taken = []
    for times in (1, 8):
        source = "import torch\n" + "".join(statements.format(number) for number in range(times * count))
        start = time.process_time()
        assert len(one_file.scan_source(source.encode(), "a.py").hits) == times * count
        taken.append(time.process_time() - start)
    assert taken[1] < 24 * max(taken[0], 0.02)


@pytest.mark.parametrize(
    "statements",
    [
        "    for i in range({0}):\n        t = t + torch.arange(n, dtype=torch.float32)\n        u = t / i\n",
        "    while k < {0}:\n        if k:\n            t = torch.arange(n) / t\n",
        "    if k == {0}:\n        t = torch.arange(n)\n    else:\n        t = g()\n    u = t / 7\n",
        "    if k == {0}:\n        t = torch.arange(n)\n    u = t / 7\n",
        "    try:\n        t = torch.arange(n)\n    except E:\n        t = t + 1\n    u = t / 7\n",
        "    if k == {0}:\n        t = t[0]\n",
        "    for i in t:\n        t = t[i].g() if i else g(t[0])\n",
        "    if k == {0}:\n        d = torch.float32\n    t = torch.arange(n, dtype=d)\n",
    ],
)
def test_the_work_is_linear_in_the_places_that_bind_one_name(statements: str) -> None:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    taken = []
    for times in (80, 320):
        source = "import torch\ndef f(n, k, d):\n    t = g()\n"
        source += "".join(statements.format(number) for number in range(times))
        source += "    return torch.arange(n, dtype=t.dtype)\n"
        calls = 0
        sys.setprofile(count)
        try:
            result = one_file.scan_source(source.encode(), "a.py")
        finally:
            sys.setprofile(None)
        assert result.hits
        assert not result.errors
        taken.append(calls)
    assert taken[1] < 7 * taken[0]


def test_a_huge_file_is_one_diagnostic(project: Path, scan, monkeypatch) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 10_000)
    (project / "a.py").write_text(BAD)
    (project / "huge.py").write_text("x = 1\n" * 2000)
    result = scan(".", "-q")
    assert result.exit_code == 2
    assert result.stderr == "error: huge.py: larger than 10,000 bytes, not scanned\n"
    assert "a.py:7" in result.stdout


def test_a_large_file_is_scanned(project: Path, findings) -> None:
    (project / "a.py").write_text("x = 1\n" * 100_000 + BAD)
    (found,) = findings("a.py")
    assert found["line"] == 100_007


def test_a_symbolic_link_to_a_directory_above_is_passed_over(project: Path, scan, findings) -> None:
    (project / "sub").mkdir()
    (project / "sub" / "a.py").write_text(BAD)
    (project / "b.py").write_text(BAD)
    (project / "sub" / "up").symlink_to(project)
    (project / "sub" / "root").symlink_to("/")
    (project / "self").symlink_to("self")
    assert [found["path"] for found in findings(".")] == ["b.py", "sub/a.py"]
    assert [found["path"] for found in findings("sub")] == ["sub/a.py"]
    assert scan(".", "-q").stderr == ""


def test_symbolic_links_that_loop_are_one_diagnostic_each(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    (project / "one.py").symlink_to("two.py")
    (project / "two.py").symlink_to("one.py")
    result = scan(".", "--format", "json", "--select", "SR001", "-q")
    assert result.exit_code == 2
    assert [error["path"] for error in json.loads(result.stdout)["errors"]] == ["one.py", "two.py"]
    assert len(result.stderr.splitlines()) == 2
    assert [found["path"] for found in json.loads(result.stdout)["findings"]] == ["a.py"]


def test_a_directory_that_is_reached_twice_is_scanned_once(project: Path, findings) -> None:
    (project / "real").mkdir()
    (project / "real" / "a.py").write_text(BAD)
    (project / "also").symlink_to("real")
    assert len(findings(".")) == 1


def test_what_is_no_readable_file_is_one_diagnostic(project: Path, scan) -> None:
    os.mkfifo(project / "pipe.py")
    (project / "gone.py").symlink_to("nowhere.py")
    (project / ".#lock.py").symlink_to("user@host.1")
    (project / "dir.py").mkdir()
    (project / "dir.py" / "a.py").write_text(BAD)
    result = scan(".", "missing.py", "-q", "--select", "SR001")
    assert result.exit_code == 2
    assert sorted(line.split(": ")[1] for line in result.stderr.splitlines()) == [
        "gone.py",
        "missing.py",
        "pipe.py",
    ]
    assert "dir.py/a.py:7" in result.stdout


def test_what_could_not_be_scanned_is_not_called_clean(project: Path, scan) -> None:
    (project / "good.py").write_text("x = 1\n")
    assert scan("missing.py", "good.py").stderr.splitlines()[1:] == [
        "no findings in 1 file; 1 file could not be scanned"
    ]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_one_diagnostic(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    (project / "b.py").write_text(BAD)
    (project / "b.py").chmod(0)
    (project / "c").mkdir(mode=0)
    result = scan(".", "-q")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert "Permission denied" in result.stderr


def test_a_read_error_is_one_diagnostic(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    result = scan("a.py", "/proc/self/mem", "x" * 300 + ".py", "-q", "--select", "SR001")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert "a.py:7" in result.stdout


def test_names_that_are_no_text_are_printed_escaped(project: Path) -> None:
    name = b"caf\xe9.py"
    (Path(os.fsdecode(os.fsencode(project) + b"/" + name))).write_text(BAD)
    for style in ("text", "json", "sarif", "github"):
        done = run_process("scan", ".", "--format", style, "--select", "SR001")
        assert done.returncode == 1, done.stderr
        assert b"SR001" in done.stdout


def test_a_process_that_dies_takes_no_other_file_with_it(project: Path, monkeypatch) -> None:
    for number in range(40):
        (project / f"m{number}.py").write_text(BAD)
    monkeypatch.setattr(runner, "scan_file", _die_at_7)
    monkeypatch.setattr(runner.scan_chunk, "__defaults__", (_die_at_7,))
    results = runner.scan_files([f"m{number}.py" for number in range(40)], Cache(None), jobs=2)
    errors = [error for result in results.values() for error in result.errors]
    assert [error.path for error in errors] == ["m7.py"]
    assert "killed" in errors[0].message
    assert sum(bool(result.hits) for result in results.values()) == 39


_scan_file = runner.scan_file


def _die_at_7(path: str) -> runner.Keyed:
    if path == "m7.py":
        os.kill(os.getpid(), signal.SIGKILL)
    return _scan_file(path)


def test_several_processes_give_the_same_as_one(project: Path, scan) -> None:
    for number in range(60):
        (project / f"m{number}.py").write_text(BAD + f"x = {number}  # noqa: SR001\n")
    (project / "broken.py").write_text("x = (\n")
    one = scan(".", "--jobs", "1", "--no-cache", "--format", "json")
    three = scan(".", "--jobs", "3", "--no-cache", "--format", "json")
    assert (one.stdout, one.stderr, one.exit_code) == (three.stdout, three.stderr, three.exit_code)


def test_several_processes_leave_a_script_without_a_main_guard_alone(project: Path) -> None:
    for number in range(40):
        (project / f"m{number}.py").write_text(BAD)
    script = project / "script.py"
    script.write_text("from safe_rope.scan import scan\nprint(len(scan(['.'], jobs=2).findings))\n")
    run = subprocess.run([sys.executable, script], capture_output=True, env=environment(), check=False)
    assert run.stdout == b"40\n", run.stderr


def test_progress_counts_the_files_that_the_cache_does_not_know(project: Path) -> None:
    for number in range(40):
        (project / f"m{number}.py").write_text(BAD)
    told: list[tuple[int, int]] = []
    for jobs in (1, 2):
        paths = [f"m{number}.py" for number in range(40)]
        runner.scan_files(paths, Cache(None), jobs=jobs, progress=lambda *done: told.append(done))
    assert told == [(done, 40) for done in range(40)] * 2


@pytest.mark.parametrize(("quiet", "shown"), [([], True), (["--quiet"], False)])
def test_progress_is_shown_on_a_terminal_and_only_there(project: Path, quiet: list[str], shown: bool) -> None:
    code = (
        "import sys; from safe_rope.cli import _progress; _progress._PATIENCE = 0;"
        "from safe_rope.scan.run import runner; import time; scan = runner.scan_file;"
        "runner.scan_file = lambda path: time.sleep(0.1) or scan(path);"
        "from safe_rope.cli.main import main; main()"
    )
    for number in range(10):
        (project / f"m{number}.py").write_text(CLEAN)
    command = [sys.executable, "-c", code, "scan", ".", "--jobs", "1", "--no-cache", *quiet]
    master, slave = pty.openpty()
    try:
        on_terminal = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, env=environment())
        os.close(slave)
        seen = b""
        with contextlib.suppress(OSError):  # the terminal is gone with its last writer
            while data := os.read(master, 4096):
                seen += data
        assert on_terminal.wait(timeout=60) == 0
    finally:
        os.close(master)
    assert (b"scanning" in seen) == shown
    piped = subprocess.run(command, capture_output=True, check=True, env=environment())
    assert b"scanning" not in piped.stderr


def test_a_tuple_that_a_loop_takes_is_no_assignment() -> None:
    source = b"import torch\nfor t in (torch.arange(9999, dtype=torch.float32), 1):\n    t\n"
    assert not one_file.scan_source(source, "model.py").errors
