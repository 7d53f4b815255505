"""Runs checks and tests on version pairs from one queue, a few at a time, so that no core waits for a pair.

The tests run in lots, each in a process of its own: DeepSpeed leaves much behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from _environment import ROOT, Environment, Pair, newest_pair
from _process import ToolError, end_running, run, say

# The longest first; whatever is in none of them makes up one more.
LOTS = (
    ("autocast",),
    ("cli", "docs", "integrations"),
    ("models", "unit"),
    ("zero",),
    ("gpu", "numerics", "scan", "tools"),
    ("zoo",),
)
# What imports neither transformers nor DeepSpeed (the torch is the same everywhere), or is for the newest.
ONCE = {"docs", "numerics", "scan", "tools"}
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("-c", "from importlinter.cli import lint_imports_command as lint; lint()"),
    ("mypy",),
    ("mypy", "tools"),
)
CHECK_LIMIT = 300.0
JOBS = min(2, os.cpu_count() or 1)


@dataclass(frozen=True)
class Job:
    """One module for the Python of a pair's environment to run."""

    pair: Pair
    command: tuple[str, ...]
    limit: float

    @property
    def name(self) -> str:
        return f"{self.pair.name}: {' '.join(self.command)}"


@dataclass(frozen=True)
class Ended:
    """How a job ended; ``seconds`` is None where its environment could not be made."""

    job: Job
    status: int
    seconds: float | None


def checks(pair: Pair) -> Iterator[Job]:
    """Return the checks of the source."""
    return (Job(pair, command, CHECK_LIMIT) for command in CHECKS)


def tests(chosen: Sequence[Pair], arguments: Sequence[str], limit: float) -> Iterator[Job]:
    """Return pytest once for each pair with the arguments, or without any in lots, the longest of all first.

    Args:
        chosen: the pairs; on an older one the tests of ``ONCE`` are left out.
        arguments: pytest's.
        limit: seconds for each process.

    """
    whole = [[[*arguments]] if arguments else lots(newest=pair == newest_pair()) for pair in chosen]
    for row in itertools.zip_longest(*whole):
        for pair, paths in zip(chosen, row, strict=True):
            if paths is not None:
                yield Job(pair, ("pytest", *paths), limit)


def lots(*, newest: bool) -> list[list[str]]:
    """Return the lots, each a list of paths for pytest; every test is in one of them."""
    folder = ROOT / "tests"
    left = {path.name for path in folder.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    left |= {path.name for path in folder.glob("test_*.py")}
    if not newest:
        left -= ONCE
    found = []
    for lot in LOTS:
        found.append(sorted(left.intersection(lot)))
        left.difference_update(lot)
    found.append(sorted(left))
    return [[f"tests/{name}" for name in lot] for lot in found if lot]


def run_jobs(work: Sequence[Job], at_a_time: int) -> list[Ended]:
    """Make the environments and run the jobs in them, so many at a time; return how each ended, in order.

    A job starts when its environment is there. Its output comes when it has ended, unless it is the only one
    or they run one by one. Whatever runs is ended on an error.
    """
    pairs = dict.fromkeys(job.pair for job in work)
    shown = at_a_time == 1 or len(work) == 1
    with contextlib.ExitStack() as held, ThreadPoolExecutor(max_workers=max(1, at_a_time)) as pool:
        try:
            # The pool starts them in this order: what a job waits for is never behind it.
            ready = {pair: pool.submit(_make, Environment(pair), held) for pair in pairs}
            running = [pool.submit(_run, job, ready[job.pair], shown) for job in work]
            return [future.result() for future in running]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_running()
            raise


def summary(ended: Sequence[Ended]) -> int:
    """Say how long everything took and what failed; return the first status that is not 0."""
    for one in ended:
        if one.seconds is not None:
            say(f"{one.job.name}: {_how(one.status)}, {one.seconds:.0f} s")
        else:
            say(f"{one.job.name}: not run")
    return next((one.status for one in ended if one.status), 0)


def _make(environment: Environment, held: contextlib.ExitStack) -> Environment:
    try:
        held.enter_context(environment.ready())
    except ToolError as error:
        say(f"error: {error}")
        raise
    return environment


def _run(job: Job, ready: Future[Environment], shown: bool) -> Ended:
    try:
        environment = ready.result()
    except ToolError:
        return Ended(job, 2, None)
    say(f"--- {job.name}")
    module = () if job.command[0] == "-c" else ("-m",)
    command = [str(environment.python), *module, *job.command]
    began = time.monotonic()
    if shown:
        status = run(command, env=environment.variables(), cwd=ROOT, limit=job.limit)
    else:
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            status = run(command, env=environment.variables(), cwd=ROOT, limit=job.limit, output=output)
            output.seek(0)
            print(output.read(), flush=True)
    seconds = time.monotonic() - began
    say(f"--- {job.name}: {_how(status)}, {seconds:.0f} s")
    return Ended(job, status, seconds)


def _how(status: int) -> str:
    return "passed" if status == 0 else f"failed with status {status}"
