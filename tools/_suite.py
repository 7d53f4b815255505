"""Runs the tests in lots, two at a time, each in a process of its own: DeepSpeed leaves much behind."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from _environment import ROOT, Environment, newest_pair
from _process import end_running, run, say

# The longest first; whatever is in none of them makes up one more.
LOTS = (
    ("autocast",),
    ("cli", "docs", "integrations"),
    ("gpu", "models", "scan", "unit"),
    ("zero",),
    ("zoo",),
)
# What depends on no version of torch, transformers or DeepSpeed, or is written for the newest.
ONCE = {"docs", "scan"}
JOBS = min(2, os.cpu_count() or 1)

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_tests(environment: Environment, arguments: Sequence[str], limit: float, jobs: int = 1) -> int:
    """Run pytest once with the arguments, or without any in lots; return the first status that is not 0.

    Args:
        environment: what to run them in; on an older pair the tests of ``ONCE`` are left out.
        arguments: pytest's.
        limit: seconds for each process.
        jobs: lots at a time; the output of one comes when it has ended, unless it is one.
    """
    say(f"--- pytest, {environment.pair.name}")
    if arguments:
        return _pytest(environment, arguments, limit)

    def run_lot(folders: list[str]) -> int:
        say(f"--- {' '.join(folders)}: started")
        began = time.monotonic()
        if jobs == 1:
            status = _pytest(environment, folders, limit)
        else:
            with tempfile.TemporaryFile("w+", errors="replace") as output:
                status = _pytest(environment, folders, limit, output)
                output.seek(0)
                print(output.read(), flush=True)
        ended = "passed" if status == 0 else f"failed with status {status}"
        say(f"--- {' '.join(folders)}: {ended}, {time.monotonic() - began:.0f} s")
        return status

    statuses = at_a_time(jobs, run_lot, lots(newest=environment.pair == newest_pair()))
    return next((status for status in statuses if status), 0)


def lots(*, newest: bool) -> list[list[str]]:
    """Return the lots, each a list of paths for pytest; every test is in one of them."""
    tests = ROOT / "tests"
    left = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    left |= {path.name for path in tests.glob("test_*.py")}
    if not newest:
        left -= ONCE
    found = []
    for lot in LOTS:
        found.append(sorted(left.intersection(lot)))
        left.difference_update(lot)
    found.append(sorted(left))
    return [[f"tests/{name}" for name in lot] for lot in found if lot]


def at_a_time(jobs: int, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return what ``work`` gives for each item, ``jobs`` of them at a time; end all children on an error."""
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_running()
            raise


def _pytest(
    environment: Environment, arguments: Sequence[str], limit: float, output: IO[str] | None = None
) -> int:
    command: list[str | Path] = [environment.python, "-m", "pytest", *arguments]
    return run(command, env=environment.variables(), cwd=ROOT, limit=limit, output=output)
