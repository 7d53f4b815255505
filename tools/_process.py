"""Child processes that end: every one has a time limit, and takes its own children with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

_running: set[subprocess.Popen[bytes]] = set()


class ToolError(Exception):
    """Something the user can act on; the message is one line that says what to do."""


def say(line: str) -> None:
    """Report one step. Progress is stderr's; stdout is for data."""
    print(line, file=sys.stderr, flush=True)


def free_port() -> int:
    """Return a port that nobody listens on. DeepSpeed names its shared memory by the port: 0 is no choice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, so that children are ended and locks are given back."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit: float,
    output: IO[str] | None = None,
) -> int:
    """Run a command in a process group of its own and return its exit status.

    Args:
        command: the program and its arguments.
        cwd: the folder to run in; the caller's where None.
        env: the whole environment of the child; the caller's where None.
        limit: seconds, after which the group is killed.
        output: where stdout and stderr go together; inherited where None.

    Returns:
        the exit status, 128 + n for a child that signal n ended, 124 for one that ran past the limit.

    """
    errors = None if output is None else subprocess.STDOUT
    child = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=None if env is None else dict(env),
        cwd=cwd,
        start_new_session=True,
    )
    _running.add(child)
    try:
        status = child.wait(limit)
    except subprocess.TimeoutExpired:
        say(f"error: stopped after {limit:.0f} s: {' '.join(str(part) for part in command[:4])} ...")
        status = 124
    finally:
        _running.discard(child)
        end_group(child)
    return status if status >= 0 else 128 - status


def run_worker(script: Path, *arguments: str | Path, limit: float) -> None:
    """Run a script on this Python, on CPU, as the only rank of a process group.

    Raises:
        ToolError: it failed (the message is the end of what it printed), or ran past the limit (in seconds).

    """
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            env={**os.environ, **rank, **place, **fixed},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"no result after {limit:.0f} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise ToolError("\n".join(lines[-12:]) or f"exit status {done.returncode}, and no output")


def end_running() -> None:
    """End every child that another thread still waits for, with time to end its own children."""
    for child in list(_running):
        child.terminate()


def end_group(child: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
