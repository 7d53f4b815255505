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

# Seconds that a child has to end its own children in.
GRACE = 5.0

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
    limit: float | None,
    output: IO[str] | None = None,
) -> int:
    """Run a command in a process group of its own and return its exit status.

    Args:
        command: the program and its arguments.
        cwd: the folder to run in; the caller's where None.
        env: the whole environment of the child; the caller's where None.
        limit: seconds, after which the group is ended.
        output: where stdout and stderr go together; inherited where None.

    Returns:
        the exit status, 128 + n for a child that signal n ended, 124 for one that ran past the limit.

    """
    child = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=env,
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
        _end_group(child)
    return status if status >= 0 else 128 - status


def end_running() -> None:
    """End every child that another thread still waits for, with time to end its own children."""
    for child in list(_running):
        child.terminate()


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child, with time to end its own children, and kill what is left of its process group."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
