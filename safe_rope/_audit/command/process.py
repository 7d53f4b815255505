"""Start the process that measures, follow it, leave nothing of it behind. Never imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from safe_rope.errors import SafeRopeError

Listener = Callable[[dict[str, Any]], None]


class MeasurementError(SafeRopeError):
    """The process that measures said what is wrong; ``trace`` is its traceback."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def measure(
    request: dict[str, Any], listen: Listener, collect: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Run ``request`` in a process of its own and return its result.

    Args:
        request: what the worker finds as ``job.json``.
        listen: called with each message about how far it is.
        collect: called with the folder that the worker wrote to, before that is deleted.

    Raises:
        MeasurementError: it failed; one line.
        KeyboardInterrupt: this process was interrupted or asked to end.
    """
    with tempfile.TemporaryDirectory(prefix="safe-rope-") as name, _termination_as_interrupt():
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(request), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "safe_rope._audit.command.worker", name],
            stdin=subprocess.PIPE,  # it ends when this pipe does, however this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(folder, device="compare" in request),
            start_new_session=True,
        )
        try:
            result = _follow(process, folder, listen)
        finally:
            _end(process)
        if collect is not None:
            collect(folder)
        return result


def _environment(folder: Path, device: bool) -> dict[str, str]:
    """One process on one CPU is the whole world, and caches go to the folder that is deleted."""
    environment = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE"):
        environment.pop(name, None)
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),  # compilers put their caches there
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    if not device:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **alone}
    return environment


def _follow(process: subprocess.Popen[bytes], folder: Path, listen: Listener) -> dict[str, Any]:
    assert process.stdout is not None
    assert process.stderr is not None
    early: list[bytes] = []  # before the worker has redirected it, a broken environment complains here
    reader = threading.Thread(target=lambda pipe=process.stderr: early.append(pipe.read()), daemon=True)
    reader.start()
    for line in process.stdout:
        message = json.loads(line)
        if "error" in message:
            raise MeasurementError(message["error"], message.get("trace", ""))
        if "result" in message:
            return dict(message["result"])
        listen(message)
    status = process.wait()
    reader.join(timeout=5)
    log = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
    said = (b"".join(early).decode(errors="replace") + log).strip()
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = said.splitlines()[-1] if said else "it said nothing"
    raise MeasurementError(f"the process that measures ended with {how}: {last}", said)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the worker and what it forked; wait, so that nobody writes into the folder any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP clean up as an interrupt does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, interrupt) for number in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
