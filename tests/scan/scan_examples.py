"""Source that has findings, and the command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# One SR001 in a constructor, at line 7, whose fix is safe: its arguments are annotated integers.
BAD = """\
import torch
from torch import nn

class Rotary(nn.Module):
    def __init__(self, max_positions: int):
        super().__init__()
        t = torch.arange(max_positions, dtype=torch.float32)
        self.register_buffer("t", t, persistent=False)
"""
FIXED = BAD.replace("dtype=torch.float32)", "dtype=torch.int64).to(torch.float32)")
CALL = "torch.arange(max_positions, dtype=torch.float32)"
# The same in an inherited dtype: SR002, whose fix is unsafe if there is one.
INHERITED = BAD.replace("torch.float32", "inv_freq.dtype").replace(
    "max_positions: int", "max_positions: int, inv_freq"
)
CLEAN = "import torch\n\nx = torch.zeros(3)\n"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def run_python(code: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120, check=False, env=environment(**more)
    )


COMMAND = (sys.executable, "-c", "from safe_rope.cli.main import main; main()")


def run_process(*arguments: str, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
        env=environment(**more),
    )
