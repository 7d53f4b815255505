"""Run `safe-rope` as a user does: a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.children import signals_of_a_terminal, surroundings

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
COMMAND = [sys.executable, "-c", "from safe_rope.cli.main import main; main()"]


def environment(scratch: Path) -> dict[str, str]:
    """What the command sees: temporary files in ``scratch``, and no colours or ranks of the surroundings."""
    paths = [str(ROOT), str(ROOT / "patches"), os.environ.get("PYTHONPATH", "")]
    return surroundings() | {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def start(scratch: Path, *arguments: str, path: str = "") -> subprocess.Popen[str]:
    scratch.mkdir(exist_ok=True)
    seen = environment(scratch)
    seen["PYTHONPATH"] = os.pathsep.join(filter(None, (path, seen["PYTHONPATH"])))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with signals_of_a_terminal():
        return subprocess.Popen([*COMMAND, *arguments], env=seen, **pipes)


def run(scratch: Path, *arguments: str, seconds: float = 300, path: str = "") -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr; nothing may be left in ``scratch``.

    ``path``: a folder that Python searches first.
    """
    process = start(scratch, *arguments, path=path)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    left = [str(path) for path in scratch.rglob("*")]
    assert not left, f"left behind: {left}\n{err}"
    return process.returncode, out, err
