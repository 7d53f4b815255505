from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from scan_examples import BAD, CALL, CLEAN, COMMAND, FIXED, ROOT, environment, run_process, run_python


def test_exit_status_tells_clean_findings_and_errors_apart(project: Path) -> None:
    (project / "clean.py").write_text(CLEAN)
    (project / "bad.py").write_text(BAD)
    (project / "broken.py").write_text("def f(:\n")
    assert run_process("scan", "clean.py").returncode == 0
    assert run_process("scan", "bad.py").returncode == 1
    assert run_process("scan", "broken.py", "bad.py").returncode == 2
    assert run_process("scan", "no_such_file.py").returncode == 2
    assert run_process("scan").returncode == 2
    assert run_process("scan", "--format", "xml", "clean.py").returncode == 2


def test_nothing_scanned_is_imported_and_neither_is_torch(project: Path) -> None:
    (project / "bad.py").write_text(BAD + "\nraise SystemExit('executed')\n")
    (project / "n.ipynb").write_text(
        json.dumps({"cells": [{"cell_type": "code", "source": ["raise SystemExit(9)\n"]}], "nbformat": 4})
    )
    code = (
        "import sys\n"
        "from safe_rope.cli.main import main\n"
        "try: main(['scan', '.', '--diff', '--no-cache', '--jobs', '1'])\n"
        "except SystemExit as end: assert end.code == 1, end.code\n"
        "bad = {'torch', 'libcst', 'numpy', 'transformers', 'wrapt', 'bad'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert b"+        t = torch.arange(max_positions, dtype=torch.int64)" in done.stdout


def test_rule_imports_no_torch() -> None:
    code = (
        "import sys\nfrom safe_rope.cli.main import main\n"
        "try: main(['rule', 'SR001'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_directory_is_scanned_without_what_is_not_its_owners(project: Path, findings) -> None:
    for place in ("a", "b/c", ".git", "build", "node_modules/x", "__pycache__", "env", "b/venv"):
        (project / place).mkdir(parents=True)
        (project / place / "m.py").write_text(BAD)
    (project / "env" / "pyvenv.cfg").write_text("home = /usr\n")
    (project / "b" / "readme.txt").write_text(BAD)
    assert [found["path"] for found in findings(".")] == ["a/m.py", "b/c/m.py"]


def test_an_excluded_directory_is_scanned_when_it_is_named(project: Path, findings) -> None:
    (project / "build").mkdir()
    (project / "build" / "m.py").write_text(BAD)
    assert [found["path"] for found in findings("build")] == ["build/m.py"]


def test_each_file_is_scanned_once_however_often_it_is_named(project: Path, findings) -> None:
    (project / "m.py").write_text(BAD)
    assert len(findings("m.py", ".", "./m.py", str(project))) == 1


def test_any_name_is_scanned_when_it_is_given_as_a_file(project: Path, findings) -> None:
    (project / "script").write_text(BAD)
    assert findings(".") == []
    assert len(findings("script")) == 1


def test_stdin_is_scanned_under_the_given_name(scan) -> None:
    result = scan("-", "--format", "json", "--select", "SR001", "--stdin-filename", "src/m.py", stdin=BAD)
    assert result.exit_code == 1
    assert [found["path"] for found in json.loads(result.stdout)["findings"]] == ["src/m.py"]
    assert scan("-", stdin=CLEAN).exit_code == 0
    assert scan("-", "other.py", stdin=CLEAN).exit_code == 2


def test_stdin_is_fixed_to_stdout_and_findings_go_to_stderr(scan) -> None:
    crlf = BAD.replace("\n", "\r\n").encode()
    result = scan("-", "--fix", "--select", "SR001", stdin=crlf)
    assert result.stdout_bytes == FIXED.replace("\n", "\r\n").encode()
    assert result.exit_code == 0


def test_package_is_found_without_importing_it(project: Path) -> None:
    (project / "lib" / "hazard_pkg" / "sub").mkdir(parents=True)
    (project / "lib" / "hazard_pkg" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (project / "lib" / "hazard_pkg" / "sub" / "m.py").write_text(BAD)
    (project / "lib" / "one_module.py").write_text(BAD + "raise SystemExit('imported')\n")
    paths = f"{ROOT}:{project / 'lib'}"
    for name, file in (
        ("hazard_pkg", "lib/hazard_pkg/sub/m.py"),
        ("hazard_pkg.sub", "lib/hazard_pkg/sub/m.py"),
        ("one_module", "lib/one_module.py"),
    ):
        done = run_process("scan", "--package", name, "--format", "json", PYTHONPATH=paths)
        assert done.returncode == 1, done.stderr
        assert {found["path"] for found in json.loads(done.stdout)["findings"]} == {file}


@pytest.mark.parametrize("name", ["no_such_package_here", "sys", "../up", "json.no_such"])
def test_a_package_that_is_not_there_is_one_clear_line(project: Path, name: str) -> None:
    done = run_process("scan", "--package", name)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_nothing_to_scan_is_said(project: Path, scan) -> None:
    result = scan(".")
    assert result.exit_code == 0
    assert "nothing to scan" in result.stderr


def test_quiet_prints_findings_and_errors_only(project: Path, scan) -> None:
    (project / "bad.py").write_text(BAD)
    (project / "broken.py").write_text("def f(:\n")
    result = scan(".", "--quiet")
    assert "bad.py:7:13" in result.stdout
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: broken.py:1:")


def test_select_and_ignore_take_lists_and_any_case(project: Path, scan) -> None:
    (project / "bad.py").write_text(BAD)
    assert scan("bad.py", "--select", "sr001,SR002").exit_code == 1
    assert scan("bad.py", "--select", "SR001", "--select", "SR002", "--ignore", "SR001").exit_code == 0
    assert scan("bad.py", "--select", "SR002").exit_code == 0


def test_unknown_rule_is_an_error_that_names_the_nearest(project: Path, scan) -> None:
    (project / "bad.py").write_text(BAD)
    for option in ("--select", "--ignore"):
        result = scan("bad.py", option, "SR0001")
        assert result.exit_code == 2
        assert "'SR001'" in result.stderr
        assert "Traceback" not in result.stderr


def test_statistics_group_identical_code_of_several_files(project: Path, scan) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (project / name).write_text(BAD)
    (project / "d.py").write_text(BAD.replace("max_positions, d", "\n            max_positions,  d"))
    (project / "e.py").write_text(BAD.replace("torch.arange(max_positions", "torch.arange(0, max_positions"))
    result = scan(".", "--statistics", "--select", "SR001")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0][:2] == ["5", "SR001"]
    assert rows[1][0] == "3"
    assert rows[1][-2:] == ["[3", "files]"]
    assert CALL in result.stdout
    assert result.exit_code == 1


def test_statistics_leave_the_json_on_stdout_alone(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    result = scan(".", "--statistics", "--format", "json")
    assert set(json.loads(result.stdout)) == {"findings", "errors"}
    assert "SR001" in result.stderr


def test_rule_explains_with_both_examples_and_lists_without_a_name() -> None:
    from safe_rope.scan.rules import RULES

    shown = run_process("rule", "sr001")
    assert shown.returncode == 0
    text = shown.stdout.decode()
    rule = RULES["SR001"]
    assert rule.summary in text
    assert rule.explanation.strip().splitlines()[0].strip() in text
    for example in (rule.VALID[0], rule.INVALID[0]):
        assert example.strip().splitlines()[-1].strip() in text
    listed = run_process("rule").stdout.decode().splitlines()
    assert [line.split()[0] for line in listed] == [f"SR{number:03}" for number in range(1, 14)]
    wrong = run_process("rule", "SR0003")
    assert wrong.returncode == 2
    assert b"SR003" in wrong.stderr


def test_a_closed_pipe_is_no_error(project: Path) -> None:
    for number in range(300):
        (project / f"m{number}.py").write_text(BAD)
    process = subprocess.Popen(
        [*COMMAND, "scan", ".", "-q", "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


def test_the_hook_runs_the_command_on_python_and_notebooks() -> None:
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert "id: safe-rope-scan" in hook
    assert "entry: safe-rope scan" in hook
    assert "language: python" in hook
    assert "types_or: [python, jupyter]" in hook


def test_notes_alone_exit_zero_and_can_be_left_out(project: Path, scan) -> None:
    (project / "note.py").write_text(BAD.replace("__init__", "forward"))
    (project / "error.py").write_text(BAD)
    assert scan("note.py", "--select", "SR001").exit_code == 0
    assert "note.py:7" in scan("note.py", "--select", "SR001").stdout
    assert scan("note.py", "--select", "SR001", "--min-severity", "warning").stdout == ""
    assert scan("error.py", "--select", "SR001").exit_code == 1
    assert scan("error.py", "--select", "SR001", "--exit-zero").exit_code == 0
    assert scan("error.py", "missing.py", "--exit-zero").exit_code == 2
