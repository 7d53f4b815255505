"""What a process that a test starts inherits: nothing that depends on how the tests were started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COLOURS = ("NO_COLOR", "FORCE_COLOR")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def surroundings() -> dict[str, str]:
    """Return the environment without ranks, colours and the settings of safe_rope."""
    left_out = (*RANKS, *COLOURS)
    return {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith("SAFE_ROPE")
    }


def with_our_modules() -> dict[str, str]:
    """Return the environment for a Python that imports what the tests import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def launch(command: Sequence[str], environment: dict[str, str], log: Path, seconds: float) -> tuple[int, str]:
    """Run a command in a process group of its own, which ends with it; return its exit status and output."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return status, log.read_text(errors="replace")


@contextlib.contextmanager
def signals_of_a_terminal() -> Iterator[None]:
    """Let the child that is started inside react to the signals that a user sends.

    A child ignores what its parent ignores, as after ``nohup tests &``. What has a handler in the parent is
    at its default in the child.
    """
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
