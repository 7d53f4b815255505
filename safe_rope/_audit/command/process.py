"""Start the process that measures, follow it, leave nothing of it behind. Never imports torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from safe_rope._audit.command.job import Job
from safe_rope.errors import SafeRopeError

Listener = Callable[[dict[str, Any]], None]

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}


class MeasurementError(SafeRopeError):
    """The process that measures said what is wrong; its traceback is the cause."""

    def __init__(self, said: str, trace: str) -> None:
        super().__init__(said)
        self.__cause__ = RuntimeError(f"in the process that measures:\n{trace}")


def measure(
    asked: Job | dict[str, Any], listen: Listener, collect: Callable[[Path], None] = lambda folder: None
) -> Any:
    """Do in a separate process what was asked, and return its result.

    Args:
        asked: a `Job`, which results in an `Outcome`; or what `compare_sides` takes.
        listen: called with each message about how far it is.
        collect: called with the folder that the worker wrote to, before that is deleted.

    Raises:
        MeasurementError: it failed; one line.
        KeyboardInterrupt: this process was interrupted or asked to end.
    """
    with tempfile.TemporaryDirectory(prefix="safe-rope-") as name, _termination_as_interrupt():
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(asked))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "safe_rope._audit.command.worker", name],
                stdin=subprocess.PIPE,  # it ends when this pipe does, however this process ends
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(folder, alone=isinstance(asked, Job)),
                cwd=folder,  # -m looks for modules there first: not where a checkpoint lies
                start_new_session=True,
            )
        with process:
            try:
                result = _follow(process, folder / "log", listen)
            finally:
                # Nobody writes into the folder any more once the worker and what it forked have ended.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        collect(folder)
        return result


def _environment(folder: Path, alone: bool) -> dict[str, str]:
    """One process on one CPU is the whole world, and caches go to the folder that is deleted."""
    environment = {k: v for k, v in os.environ.items() if k not in (*_ALONE, "MASTER_ADDR", "MASTER_PORT")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),  # compilers put their caches there
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
    }
    if alone:
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} | _ALONE
    return environment


def _follow(process: subprocess.Popen[bytes], log: Path, listen: Listener) -> Any:
    assert process.stdout is not None
    while True:
        try:
            message = pickle.load(process.stdout)
        except Exception:  # it has ended, or something else was written to its stdout
            process.stdout.read()
            break
        if "error" in message:
            raise MeasurementError(message["error"], message["trace"])
        if "result" in message:
            return message["result"]
        listen(message)
    status = process.wait()
    said = log.read_text(errors="replace").strip()
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = said.splitlines()[-1] if said else "it said nothing"
    raise MeasurementError(f"the process that measures ended with {how}: {last}", said)


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP clean up as an interrupt does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
