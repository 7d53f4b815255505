from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from sarif_schema import violations
from scan_examples import BAD, CALL, COMMAND, environment, run_process

from safe_rope.scan.engine.finding import Diagnostic, Edit, Finding, Fix, Hit
from safe_rope.scan.formats import github, sarif, text

MESSAGE = "50% off: 257 rounds to 256,\nor so"


def _hit(**changes: object) -> Hit:
    values: dict[str, object] = {
        "rule": "SR001",
        "severity": "error",
        "path": "a b,c:d/é%.py",
        "line": 3,
        "column": 5,
        "end_line": 3,
        "end_column": 8,
        "message": MESSAGE,
        "fix": Fix(True, "do it", (Edit(4, 7, "xyz"), Edit(9, 9, ""))),
    }
    values |= changes
    return Hit(Finding(**values), ("    abc def",))  # type: ignore[arg-type]


def test_json_has_exactly_the_promised_keys(project: Path, scan) -> None:
    (project / "bad.py").write_text(BAD)
    (project / "broken.py").write_text("x = (\n")
    document = json.loads(scan(".", "--format", "json", "--select", "SR001").stdout)
    assert list(document) == ["findings", "errors"]
    (finding,) = document["findings"]
    keys = ["rule", "severity", "path", "line", "column", "end_line", "end_column", "message", "fix"]
    assert list(finding) == keys
    start = BAD.splitlines()[6].index(CALL) + 1
    place = [finding[key] for key in ("rule", "path", "line", "column", "end_line", "end_column")]
    assert place == ["SR001", "bad.py", 7, start, 7, start + len(CALL)]
    assert finding["severity"] == "error"
    assert finding["fix"]["safe"] is True
    (error,) = document["errors"]
    assert list(error) == ["path", "line", "column", "message"]
    assert error["path"] == "broken.py"


def test_json_edits_are_the_bytes_to_change(project: Path, scan) -> None:
    source = ("# é日本\n" + BAD).encode()
    (project / "bad.py").write_bytes(source)
    (finding,) = json.loads(scan("bad.py", "--format", "json", "--select", "SR001").stdout)["findings"]
    for edit in sorted(finding["fix"]["edits"], key=lambda edit: -edit["start"]):
        source = source[: edit["start"]] + edit["replacement"].encode() + source[edit["end"] :]
    assert b"dtype=torch.int64).to(torch.float32)" in source


def test_json_of_a_clean_scan_is_empty(project: Path, scan) -> None:
    (project / "a.py").write_text("x = 1\n")
    assert json.loads(scan(".", "--format", "json").stdout) == {"findings": [], "errors": []}


def test_sarif_of_a_scan_follows_the_schema(project: Path, scan) -> None:
    (project / "mit leer%zeichen ü.py").write_text(BAD + BAD)
    (project / "broken.py").write_text("x = (\n")
    result = scan(".", str(project.parent / "missing.py"), "--format", "sarif")
    log = json.loads(result.stdout)
    assert violations(log) == []
    (run,) = log["runs"]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 2
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    found = [item for item in run["results"] if item["ruleId"] == "SR001"]
    assert len(found) == 2
    for item in run["results"]:
        assert rules[item["ruleIndex"]] == item["ruleId"]
        place = item["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert place == "mit%20leer%25zeichen%20%C3%BC.py"
    prints = [item["partialFingerprints"]["safeRopeFinding/v1"] for item in found]
    assert len(set(prints)) == 2


def test_sarif_fingerprint_survives_a_line_shift(project: Path, scan) -> None:
    def prints() -> list[str]:
        runs = json.loads(scan("a.py", "--format", "sarif", "--select", "SR001").stdout)["runs"]
        return [item["partialFingerprints"]["safeRopeFinding/v1"] for item in runs[0]["results"]]

    (project / "a.py").write_text(BAD)
    before = prints()
    (project / "a.py").write_text("# one more line\n\n" + BAD)
    assert prints() == before != []


def test_gitlab_tells_the_same_line_of_two_files_apart(project: Path, scan) -> None:
    def prints() -> list[str]:
        return [item["fingerprint"] for item in json.loads(scan(".", "--format", "gitlab").stdout)]

    for name in ("a.py", "b.py"):
        (project / name).write_text(BAD)
    before = prints()
    assert len(set(before)) == len(before) == 2
    (project / "a.py").write_text("# one more line\n\n" + BAD)
    assert prints() == before


def test_sarif_names_an_absolute_path_as_a_file_uri() -> None:
    log = json.loads(sarif.render([_hit(path="/tmp/a b.py")], [Diagnostic("/x y.py", 0, 0, "gone")]))
    assert violations(log) == []
    text_of_log = json.dumps(log)
    assert "file:///tmp/a%20b.py" in text_of_log
    assert "file:///x%20y.py" in text_of_log


def test_the_schema_check_can_fail() -> None:
    log = json.loads(sarif.render([_hit()], []))
    assert violations(log) == []
    log["runs"][0]["results"][0]["level"] = "fatal"
    log["runs"][0]["results"][0]["extra"] = 1
    log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    del log["runs"][0]["tool"]["driver"]["name"]
    assert len(violations(log)) == 4


def test_github_escapes_what_would_end_a_field() -> None:
    line = github.render([_hit()], [])
    assert line == (
        "::error file=a b%2Cc%3Ad/é%25.py,line=3,endLine=3,col=5,endColumn=7,title=safe-rope SR001"
        "::50%25 off: 257 rounds to 256,%0Aor so\n"
    )


def test_github_gives_no_columns_across_lines_and_calls_a_note_a_notice() -> None:
    line = github.render([_hit(end_line=4, severity="note", path="a.py")], [])
    assert line.startswith("::notice file=a.py,line=3,endLine=4,title=")


def test_github_annotates_files_that_were_not_scanned(project: Path, scan) -> None:
    (project / "broken.py").write_text("x = 1\ny = (\n")
    (line,) = scan(".", "--format", "github").stdout.splitlines()
    assert line.startswith("::error file=broken.py,line=2,col=5,title=safe-rope::")


def test_text_underlines_the_span(project: Path, scan) -> None:
    (project / "bad.py").write_text(BAD)
    lines = scan("bad.py", "--select", "SR001").stdout.splitlines()
    assert lines[0].startswith("bad.py:7:13: SR001 error: ")
    assert CALL in lines[1]
    assert lines[2].replace("|", " ").strip() == "^" * len(CALL)
    assert lines[2].index("^") == lines[1].index(CALL)
    assert lines[3].strip().startswith("= fix: ")


@pytest.mark.parametrize("before", ["é日本 = 1; ", "\tif x: ", "e\u0301 = 1; "])
def test_text_underlines_at_the_right_place_after_wide_characters(before: str) -> None:
    line = before + "torch.arange(9)"
    hit = Hit(
        Finding("SR001", "error", "a.py", 1, len(before) + 1, 1, len(line) + 1, "m"),
        (line,),
    )
    _, code, marks, *_ = text.render([hit], colored=False).splitlines()
    from rich.cells import cell_len

    assert cell_len(code[: code.index("torch")]) == cell_len(marks[: marks.index("^")])
    assert marks.count("^") == len("torch.arange(9)")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_text_stays_within_the_terminal(width: int) -> None:
    line = "x = [" + "日本語, " * 60 + "torch.arange(n, dtype=torch.float32), " + "1, " * 200 + "]"
    start = line.index("torch.arange")
    finding = Finding("SR001", "error", "a.py", 1, start + 1, 1, start + 37, "m")
    _, code, marks, *_ = text.render([Hit(finding, (line,))], colored=False, width=width).splitlines()
    from rich.cells import cell_len

    assert cell_len(code) <= width
    assert cell_len(marks) <= width
    assert code[marks_start(code, marks) :].startswith("torch.arange")


def marks_start(code: str, marks: str) -> int:
    from rich.cells import cell_len

    return next(index for index in range(len(code)) if cell_len(code[:index]) == marks.index("^"))


def test_text_prints_no_control_characters_of_the_scanned_file(project: Path, scan) -> None:
    name = "a\x1b[31m.py"
    (project / name).write_text(BAD.replace(CALL, CALL + "; y = '\x1b]0;title\x07\u202e'"))
    output = scan(name, "--select", "SR001").stdout
    assert "SR001" in output
    assert not {"\x1b", "\x07", "\u202e"} & set(output)


def test_long_paths_are_never_wrapped(project: Path) -> None:
    deep = project / ("a" * 120) / ("b" * 120)
    deep.mkdir(parents=True)
    (deep / "m.py").write_text(BAD)
    done = run_process("scan", ".", COLUMNS="40", FORCE_COLOR="1", TERM="xterm")
    assert f"{'a' * 120}/{'b' * 120}/m.py:7:13: " in done.stdout.decode()


def _on_terminal(**more: str) -> str:
    """Return what the command prints when stdout is a terminal."""
    leader, follower = pty.openpty()
    variables = {"TERM": "xterm-256color", "COLUMNS": "60", **more}
    done = subprocess.run(
        [*COMMAND, "scan", ".", "-q", "--jobs", "1"],
        stdout=follower,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=False,
        env=environment(**variables),
    )
    os.close(follower)
    output = os.read(leader, 1 << 16)
    os.close(leader)
    assert done.returncode == 1, done.stderr
    return output.decode()


def test_colours_are_for_terminals_and_no_color_is_honoured(project: Path) -> None:
    (project / "bad.py").write_text(BAD)
    assert "\x1b[" in _on_terminal()
    assert "\x1b[" not in _on_terminal(NO_COLOR="1")
    assert b"\x1b[" not in run_process("scan", ".").stdout
    assert b"\x1b[" in run_process("scan", ".", FORCE_COLOR="1", TERM="xterm").stdout
    assert b"\x1b[" not in run_process("scan", ".", FORCE_COLOR="1", NO_COLOR="1").stdout


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_span_that_fills_the_terminal_leaves_no_room_and_ends(width: int) -> None:
    from rich.cells import cell_len

    for start in range(8):
        for length in (width - 10, width, 3 * width):
            line = "a" * start + "x" * length + "y" * 40
            finding = _hit(column=start + 1, end_column=start + length + 1).finding
            rendered = text.render([Hit(finding, (line,))], colored=False, width=width).splitlines()
            assert all(cell_len(shown) <= width for shown in rendered[1:3])
