"""Speed and findings of safe-rope scan, semgrep and TorchFix over the same files, on one core.

The others are installed into folders of their own (``pip install --target``); neither the library nor its
tests need them. semgrep runs a hand-written rule for float aranges, TorchFix its defaults.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RULE = """
rules:
  - id: float-arange
    languages: [python]
    severity: ERROR
    message: an arange in a floating dtype
    pattern-either:
      - pattern: torch.arange(..., dtype=torch.float, ...)
      - pattern: torch.arange(..., dtype=torch.float32, ...)
      - pattern: torch.arange(..., dtype=torch.float64, ...)
      - pattern: torch.arange(..., dtype=$X.dtype, ...)
"""
TIMEOUT = 1500


@dataclass(frozen=True)
class Run:
    """What one tool needed for the files, and the places that it reports; ``error`` if it could not run."""

    tool: str
    cpu: float
    wall: float
    places: frozenset[tuple[str, int]]
    error: str = ""


def install(folder: Path) -> None:
    """Install both tools into a folder, unless they are there."""
    for package in ("semgrep", "torchfix"):
        if not (folder / package / "bin").is_dir():
            target = str(folder / package)
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", target, package]
            subprocess.run(command, check=False)


def compare(files: list[tuple[str, bytes]], folder: Path) -> list[Run]:
    """Run all three over a copy of the files.

    Args:
        files: path and source of each.
        folder: of the tools.
    """
    with tempfile.TemporaryDirectory() as temporary:
        code, work = Path(temporary, "code"), Path(temporary, "work")
        work.mkdir()
        for path, source in files:
            (code / path).parent.mkdir(parents=True, exist_ok=True)
            (code / path).write_bytes(source)
        (work / "rule.yaml").write_text(RULE)
        commands: dict[str, list[str | Path]] = {
            "safe-rope": [
                sys.executable, "-c", "from safe_rope.cli.main import main; main()",
                "scan", "--no-cache", "--jobs", "1", "--quiet", "--format", "json", "code",
            ],
            "semgrep": [
                sys.executable, folder / "semgrep" / "bin" / "semgrep", "scan", "--metrics=off", "-j", "1",
                "--disable-version-check", "--no-git-ignore", "--config", work / "rule.yaml", "--json",
                "--quiet", "code",
            ],
            "TorchFix": [sys.executable, folder / "torchfix" / "bin" / "torchfix", "code"],
        }  # fmt: skip
        return [_run(tool, command, Path(temporary), folder) for tool, command in commands.items()]


def _run(tool: str, command: list[str | Path], place: Path, folder: Path) -> Run:
    own = folder / tool.lower()
    path = ROOT if tool == "safe-rope" else own
    environment = {
        **os.environ, "PYTHONPATH": str(path), "HOME": str(place / "work"), "OMP_NUM_THREADS": "1",
        "PATH": f"{own / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        result = subprocess.run(
            [str(word) for word in command], cwd=place, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT, preexec_fn=_one_core,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Run(tool, 0.0, time.perf_counter() - began, frozenset(), str(error)[:200])
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if result.returncode not in (0, 1):
        return Run(tool, cpu, wall, frozenset(), result.stderr.strip()[-300:] or f"exit {result.returncode}")
    return Run(tool, cpu, wall, frozenset(_places(tool, result.stdout)))


def _one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _places(tool: str, output: str) -> set[tuple[str, int]]:
    if tool == "safe-rope":
        found = [(item["path"], item["line"]) for item in json.loads(output)["findings"]]
    elif tool == "semgrep":
        found = [(item["path"], item["start"]["line"]) for item in json.loads(output)["results"]]
    else:
        found = [
            (path, int(line)) for path, line in re.findall(r"^(\S+\.py):(\d+):\d+: ", output, re.MULTILINE)
        ]
    return {(path.removeprefix("code/"), line) for path, line in found}
