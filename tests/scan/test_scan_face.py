"""`safe_rope.scan.scan`, and what importing the package costs. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scan_examples import BAD, CLEAN

import safe_rope
from safe_rope.errors import ConfigError
from safe_rope.scan import Scanned, Settings, scan


def test_a_scan_from_python_finds_what_the_command_finds(project: Path, findings) -> None:
    (project / "a").mkdir()
    (project / "a" / "bad.py").write_text(BAD)
    (project / "b.py").write_text(BAD + CLEAN)
    (project / "broken.py").write_text("x = (\n")
    known = findings(".", "missing.py")
    scanned = scan([project / "a", "b.py", "broken.py", "missing.py"], Settings(".", frozenset({"SR001"})))
    assert isinstance(scanned, Scanned)
    assert [finding.line for finding in scanned.findings] == [item["line"] for item in known]
    assert [Path(finding.path).name for finding in scanned.findings] == ["bad.py", "b.py"]
    assert [error.path for error in scanned.errors] == ["broken.py", "missing.py"]


def test_the_nearest_pyproject_decides_where_no_settings_are_given(project: Path) -> None:
    (project / "a.py").write_text(BAD)
    assert {finding.rule for finding in scan(["a.py"]).findings} == {"SR001"}
    (project / "pyproject.toml").write_text("[tool.safe-rope]\nignore = ['SR001']\n")
    assert scan(["a.py"]) == Scanned((), ())
    (project / "pyproject.toml").write_text("[tool.safe-rope]\nignore = ['SR999']\n")
    with pytest.raises(ConfigError, match="there is no rule 'SR999'"):
        scan(["a.py"])


@pytest.mark.parametrize("path", ["a.py", Path("a.py")])
def test_one_path_is_no_list_of_paths(path: Any) -> None:
    with pytest.raises(TypeError, match=r"paths must be a list of paths, got .*; pass \["):
        scan(path)


def test_the_face_imports_the_standard_library_only_and_the_package_nothing_of_the_face() -> None:
    code = (
        "import json, sys; import safe_rope; first = sorted(sys.modules); import safe_rope.scan as s;"
        "s.scan(['nowhere']); print(json.dumps([first, sorted(sys.modules)]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = json.loads(run.stdout)
    assert [name for name in before if name.startswith("safe_rope.scan")] == []
    assert "safe_rope.scan.run.runner" in after
    assert {"torch", "transformers", "deepspeed", "click", "rich"}.isdisjoint(after)


def test_the_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("safe-rope") == safe_rope.__version__
