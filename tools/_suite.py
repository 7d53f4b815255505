"""Runs checks and tests on version pairs, the checks beside the tests, so that no core waits."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from _environment import ROOT, Environment, Pair, newest_pair
from _process import end_running, run, say

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("-c", "from importlinter.cli import lint_imports_command as lint; lint()"),
    ("mypy",),
)
CHECK_LIMIT = 300.0
# What imports neither transformers nor DeepSpeed (the torch is the same everywhere), or is for the newest.
ONCE = ("tests/rotation", "tests/scan", "tests/system/docs", "tests/system/tools")
WORKERS = min(4, os.cpu_count() or 1)


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
    """How a job ended, and after how many seconds."""

    job: Job
    status: int
    seconds: float


def checks(pair: Pair) -> Iterator[Job]:
    """Return the checks of the source."""
    return (Job(pair, command, CHECK_LIMIT) for command in CHECKS)


def tests(
    pair: Pair, arguments: Sequence[str], limit: float, workers: int, everything: bool, slow: bool
) -> Job:
    """Return a run of pytest.

    Args:
        pair: where; an older one runs the tests that are marked ``contract``, which a release can change.
        arguments: pytest's; with some, those alone are passed, and one process runs what they choose.
        limit: seconds.
        workers: how many processes of pytest share the tests, a file at a time.
        everything: also the tests that are marked ``exhaustive``, and on an older pair all but ``ONCE``.
        slow: without it, those that are marked ``slow`` are left out.

    """
    chosen = [*arguments]
    if not arguments:
        chosen += ["--quiet", "-n", str(workers), "--dist", "loadfile", "--max-worker-restart", "1"]
        marks = ["contract"] if pair != newest_pair() and not everything else []
        marks += [] if slow else ["not slow"]
        chosen += ["-m", " and ".join(marks)] if marks else []
    if pair != newest_pair():
        chosen += [f"--ignore={path}" for path in ONCE]
    if everything:
        chosen.append("--all")
    return Job(pair, ("pytest", *chosen), limit)


def run_jobs(*lanes: Sequence[Job]) -> list[Ended]:
    """Make the environments, then run the jobs of each lane in order and the lanes side by side.

    What the last lane prints is seen at once, and what the others print when a job of theirs has ended.
    Whatever runs is ended on an error.
    """
    pairs = dict.fromkeys(job.pair for lane in lanes for job in lane)
    environments = {pair: Environment(pair) for pair in pairs}
    with contextlib.ExitStack() as held:
        with ThreadPoolExecutor(WORKERS) as makers:  # pip mostly waits, and each installs on one core
            for made in [makers.submit(held.enter_context, one.ready()) for one in environments.values()]:
                made.result()
        pools = [held.enter_context(ThreadPoolExecutor(1)) for _ in lanes]
        try:
            running = [
                pool.submit(_run, job, environments[job.pair], shown=lane is lanes[-1])
                for lane, pool in zip(lanes, pools, strict=True)
                for job in lane
            ]
            return [job.result() for job in running]
        except BaseException:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
            end_running()
            raise


def summary(ended: Sequence[Ended]) -> int:
    """Say how long everything took and what failed; return the first status that is not 0."""
    for one in ended:
        say(f"{one.job.name}: {_how(one.status)}, {one.seconds:.0f} s")
    return next((one.status for one in ended if one.status), 0)


def _run(job: Job, environment: Environment, shown: bool) -> Ended:
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
