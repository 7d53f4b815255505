from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from scan_examples import BAD, CALL, FIXED

from safe_rope.scan.engine.finding import Edit, FileResult, Finding, Fix, Hit
from safe_rope.scan.fixing.apply import choose, fix_source
from safe_rope.scan.run.one_file import scan_source

FIX = ("--fix", "--select", "SR001")


@pytest.mark.parametrize(
    ("change", "encoding"),
    [
        (lambda text: text, "utf-8"),
        (lambda text: text.replace("\n", "\r\n"), "utf-8"),
        (lambda text: text.replace("\n", "\r"), "utf-8"),
        (lambda text: "\ufeff# é\n" + text, "utf-8"),
        (lambda text: "# -*- coding: latin-1 -*-\nx = 'é'\n" + text.replace(CALL, f"'é', {CALL}"), "latin-1"),
        (lambda text: text.rstrip("\n"), "utf-8"),
        (lambda text: text.replace("    ", "\t") + "\f\n# 日本 \u2028 \x85\n", "utf-8"),
        (lambda text: text.replace("max_positions,", "max_positions ,  # why\r\n            "), "utf-8"),
    ],
)
def test_a_fix_keeps_every_other_byte(project: Path, scan, change, encoding: str) -> None:
    before = change(BAD).encode(encoding)
    (project / "a.py").write_bytes(before)
    assert scan("a.py", *FIX).exit_code == 0
    after = (project / "a.py").read_bytes()
    assert after == before.replace(b"dtype=torch.float32)", b"dtype=torch.int64).to(torch.float32)")
    assert after != before


def test_all_findings_of_a_file_are_fixed_and_the_second_run_is_clean(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD * 3)
    result = scan("a.py", *FIX)
    assert result.exit_code == 0
    assert "3 findings fixed in 1 file" in result.stderr
    assert (project / "a.py").read_text() == FIXED * 3
    assert scan("a.py", *FIX).stderr.strip() == "no findings in 1 file"


def test_what_has_no_fix_is_still_reported(project: Path, scan) -> None:
    source = BAD + BAD.replace("max_positions: int", "max_positions").replace(
        "(max_positions,", "(0, max_positions, 0.25,"
    )
    (project / "a.py").write_text(source)
    result = scan("a.py", "--fix", "--select", "SR001")
    fixed = (project / "a.py").read_text()
    assert fixed.startswith(FIXED)
    assert "0.25, dtype=torch.float32)" in fixed
    assert result.exit_code == 1


def test_mode_and_symbolic_links_stay(project: Path, scan) -> None:
    (project / "real.py").write_text(BAD)
    (project / "real.py").chmod(0o751)
    (project / "link.py").symlink_to("real.py")
    assert scan("link.py", *FIX).exit_code == 0
    assert (project / "link.py").is_symlink()
    assert (project / "real.py").read_text() == FIXED
    assert stat.S_IMODE((project / "real.py").stat().st_mode) == 0o751
    assert sorted(os.listdir(project)) == ["link.py", "real.py"]


def test_two_names_of_one_file_are_fixed_once(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    (project / "b.py").symlink_to("a.py")
    assert scan(".", *FIX).exit_code == 0
    assert (project / "a.py").read_text() == FIXED


def test_a_write_that_fails_leaves_the_file_and_stops_nothing(project: Path, scan, monkeypatch) -> None:
    (project / "a.py").write_text(BAD)
    (project / "b.py").write_text(BAD)
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if target.endswith("a.py"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    result = scan(".", *FIX, "--jobs", "1", "--no-cache")
    assert result.exit_code == 2
    assert "error: a.py: cannot be fixed: No space left on device" in result.stderr
    assert (project / "a.py").read_text() == BAD
    assert (project / "b.py").read_text() == FIXED
    assert sorted(os.listdir(project)) == ["a.py", "b.py"]


def test_diff_writes_nothing_and_patch_takes_it(project: Path, scan) -> None:
    crlf = BAD.replace("\n", "\r\n").encode()
    sources = {
        "a.py": BAD.encode(),
        "b.py": crlf,
        "c.py": BAD.rstrip("\n").replace("        self", "#").encode(),
    }
    sources["d.py"] = BAD.split("        self.reg")[0].rstrip("\n").encode()
    for name, source in sources.items():
        (project / name).write_bytes(source)
    result = scan(".", "--diff", "--fix", "--select", "SR001")
    assert result.exit_code == 1
    assert {name: (project / name).read_bytes() for name in sources} == sources
    subprocess.run(["git", "apply", "-"], input=result.stdout_bytes, check=True, cwd=project)
    for name, source in sources.items():
        fixed = source.replace(b"dtype=torch.float32)", b"dtype=torch.int64).to(torch.float32)")
        assert (project / name).read_bytes() == fixed


def test_diff_of_nothing_is_empty(project: Path, scan) -> None:
    (project / "a.py").write_text(FIXED)
    result = scan("a.py", "--diff", "--select", "SR001")
    assert (result.exit_code, result.stdout) == (0, "")
    assert scan("a.py", "--diff", "--format", "json").exit_code == 2


def _hit(*edits: Edit, safe: bool = True) -> Hit:
    return Hit(Finding("SR001", "error", "a.py", 1, 1, 1, 2, "m", Fix(safe, "d", edits)), ("x",))


def test_overlapping_fixes_wait_and_shared_edits_are_made_once() -> None:
    shared = Edit(0, 0, "import torch\n")
    first = Fix(True, "", (shared, Edit(5, 9, "a")))
    second = Fix(True, "", (shared, Edit(12, 12, "b")))
    overlapping = Fix(True, "", (Edit(7, 12, "c"),))
    inside = Fix(True, "", (Edit(6, 6, "d"),))
    same_place = Fix(True, "", (Edit(12, 14, "e"),))
    assert choose([same_place, overlapping, inside, second, first]) == [second, first] or choose(
        [same_place, overlapping, inside, second, first]
    ) == [first, second]


def test_a_fix_that_would_break_the_syntax_is_not_made() -> None:
    result = FileResult("a.py", (_hit(Edit(0, 1, "(")),))
    fixed = fix_source(b"x = 1\n", result, lambda result: result.hits, unsafe=False, scan=scan_source)
    assert fixed.source == b"x = 1\n"
    assert "please report" in fixed.result.errors[0].message


def test_an_unsafe_fix_needs_its_option() -> None:
    result = FileResult("a.py", (_hit(Edit(4, 5, "2"), safe=False),))
    assert (
        fix_source(b"x = 1\n", result, lambda result: result.hits, unsafe=False, scan=scan_source).count == 0
    )
    fixed = fix_source(b"x = 1\n", result, lambda result: result.hits, unsafe=True, scan=scan_source)
    assert (fixed.source, fixed.count) == (b"x = 2\n", 1)


def test_unsafe_fixes_alone_write_nothing(project: Path, scan) -> None:
    (project / "a.py").write_text(BAD)
    assert scan("a.py", "--unsafe-fixes").exit_code == 1
    assert (project / "a.py").read_text() == BAD


def test_a_fix_of_a_large_file_that_cannot_be_parsed_is_not_blamed(project: Path, scan) -> None:
    finding = "import torch\ndef rotary(n):\n    return torch.arange(n, dtype=torch.float32)\n"
    broken = finding + "def f(x):\n    return x\n" * 300 + "def g(:\n    pass\n"
    (project / "a.py").write_text(broken)
    assert scan("a.py", "--format", "concise", "--exit-zero").exit_code == 0
    result = scan("a.py", "--fix", "--unsafe-fixes")
    assert result.exit_code == 2
    assert "a.py: not fixed, it cannot be parsed: " in result.stderr
    assert (project / "a.py").read_text() == broken
