"""Run DeepSpeed's own tests of torch.autocast with safe_rope.initialize, and with its own.

The tests come from a source checkout of DeepSpeed and run on two ranks, on CPU with gloo. Only what this
needs is replaced while they run (worker.py): the process group, the device of DDP and of GradScaler, and the
gather of scalars. With --output, one line of JSON for each test goes to a file. The exit status is 0 if every
test passes with safe_rope.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _process import ToolError, say

from laboratory.ranks import run_ranks

LIMIT = 1200.0
FILES = (
    "unit/v1/zero/test_zero_autocast.py",
    "unit/runtime/zero/test_zero_autocast_mixed_dtype.py",  # from 0.19.3 on
)
INITIALIZE = ("deepspeed", "safe_rope")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, metavar="DIR", help="a checkout of DeepSpeed")
    parser.add_argument("--with", dest="who", choices=INITIALIZE, action="append", help="default: both")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("-k", dest="only", default="", metavar="TEXT", help="tests whose names contain it")


def main(options: argparse.Namespace) -> int:
    tests = options.source.resolve() / "tests"
    if not (tests / FILES[0]).exists():
        raise ToolError(f"expected a checkout of DeepSpeed, {options.source} has no tests/{FILES[0]}")
    seen: dict[str, dict[str, str]] = {}
    for who in options.who or INITIALIZE:
        with tempfile.TemporaryDirectory() as folder:
            say(f"{who}.initialize ...")
            worker: list[Any] = ["-m", "laboratory.deepspeed_tests.worker", who, tests, options.only]

            def command(
                rank: int, begin: list[str | Path] = worker, folder: str = folder
            ) -> list[str | Path]:
                return [*begin, Path(folder, str(rank))]

            run_ranks(command, ranks=2, limit=LIMIT)
            ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
        for name in ranks[0]:
            seen.setdefault(name, {})[who] = ranks[0][name] or ranks[1].get(name, "did not run")
    for name, answers in seen.items():
        print(name, *(f"{who}: {error or 'passed'}" for who, error in answers.items()), sep="\n    ")
    for who in options.who or INITIALIZE:
        passed = sum(not answers[who] for answers in seen.values())
        print(f"{who}.initialize: {passed} of {len(seen)} passed")
    if options.output is not None:
        told = {name: {who: error or "passed" for who, error in one.items()} for name, one in seen.items()}
        versions = {name: version(name) for name in ("deepspeed", "torch")}
        rows = [json.dumps({"test": name, **one, "versions": versions}) for name, one in told.items()]
        options.output.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return 1 if any(answers.get("safe_rope") for answers in seen.values()) else 0
