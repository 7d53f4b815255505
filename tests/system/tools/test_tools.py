"""The commands in tools/ as a user meets them, without installing anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import _suite
import pytest

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = sorted((ROOT / "requirements").glob("transformers-*.txt"))
SCRIPTS = ("demo", "test", "lab")
LAB = (
    "bench",
    "chart",
    "docs",
    "engines",
    "gpu",
    "libraries",
    "matrix",
    "quality",
    "scan-eval",
    "verify-tables",
    "wheel",
    "zoo",
)
COMMANDS = [*SCRIPTS[:2], "lab", *(f"lab {name}" for name in LAB)]


def call(
    command: str, *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools" / command.split()[0], *command.split()[1:], *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_prints_usage_and_makes_no_environment(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    done = call(command, "--help", env={"SAFE_ROPE_VENV": str(folder)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: tools/{command}")
    assert not folder.exists()


def test_engines_that_are_not_installed_are_named() -> None:
    here = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    done = subprocess.run(
        [sys.executable, "-m", "laboratory", "engines"],
        env={**os.environ, **here},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name}: not measured, it cannot be imported (No package metadata was found for {name})"
        for name in ("vllm", "sglang")
    ]


def test_words_that_no_environment_of_the_wide_matrix_has_are_refused() -> None:
    done = call("lab matrix", "--wide", "torch==2.4.1 transformers==4.44.2")
    assert done.returncode == 2
    assert "no line of requirements/wide.txt has" in done.stderr


@pytest.mark.parametrize("script", ["tools/_launch.sh", ".ci/run", *(f"tools/{name}" for name in SCRIPTS)])
def test_shell_script_parses(script: str) -> None:
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_python_that_is_too_old_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python-too-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = call("test", "--python", old)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Python 3.10 or newer" in done.stderr


def test_a_folder_that_another_tool_made_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("text")
    done = call("demo", "--python", sys.executable, env={"SAFE_ROPE_VENV": str(tmp_path)})
    assert done.returncode == 2
    assert "SAFE_ROPE_VENV" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert precious.read_text() == "text"


def test_every_version_pair_pins_what_is_installed_first() -> None:
    assert len(REQUIREMENTS) == 3
    for path in REQUIREMENTS:
        lines = path.read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert all("==" in line for line in pins), path.name
        assert {"torch==2.13.0", path.stem.replace("-", "==")} <= set(pins), path.name
        assert any(line.startswith("deepspeed==") for line in pins), path.name


def test_the_sources_are_named_where_a_type_checker_looks(tmp_path: Path) -> None:
    from _environment import NAME_SOURCES

    (tmp_path / "user.py").write_text("import safe_rope\nreveal_type(safe_rope.guard())\n")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    python = venv / "bin" / "python"
    subprocess.run([python, "-c", NAME_SOURCES, ROOT, ROOT / "patches"], check=True, timeout=60)
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    seen = subprocess.run(
        [python, "-c", "import safe_rope, safe_rope_patches"],
        env=bare,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "No module named 'safe_rope" not in seen.stderr
    mypy = [sys.executable, "-m", "mypy", "--follow-imports", "silent", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [*mypy, "--python-executable", python, "user.py"],
        cwd=tmp_path,
        env=bare,
        capture_output=True,
        text=True,
    )
    assert '"safe_rope._protection.Guard"' in done.stdout, done.stdout


def test_what_correct_rounding_would_cost_is_measured() -> None:
    from laboratory.bench.tables import _correct_rounding

    assert _correct_rounding().ratio > 1


def test_what_is_tested_once_is_there() -> None:
    assert all((ROOT / path).is_dir() for path in _suite.ONCE)


def test_what_is_tested_once_depends_on_no_version() -> None:
    """Every pair has the same torch; what imports transformers or DeepSpeed has to run with each."""
    pins = {re.search(r"^torch==.+$", path.read_text(), re.M)[0] for path in REQUIREMENTS}  # type: ignore[index]
    assert len(pins) == 1
    for folder in _suite.ONCE:
        for path in (ROOT / folder).rglob("*.py") if folder != "tests/system/docs" else ():
            imports = re.findall(r"^ *(?:from|import) (transformers|deepspeed)", path.read_text(), re.M)
            assert not imports, f"{path} imports {imports[0]}"
