"""Run the tests that need a CUDA device, and the comparisons of times on it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _process import ToolError, run

LIMIT = 7200.0
TEST_LIMIT = 2300.0
ROOT = Path(__file__).resolve().parents[3]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")


def main(options: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise ToolError("this machine has no CUDA device")
    tested = run([sys.executable, "-m", "pytest", "-m", "gpu"], cwd=ROOT, limit=TEST_LIMIT)
    from laboratory.bench import rope

    options.device, options.threads, options.shape = "cuda", 1, ""
    return rope.run(("tables", "application", "training"), options) or tested
