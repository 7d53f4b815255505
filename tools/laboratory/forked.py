"""Work in a fork of this process, which has everything imported; a crash, a hang or a leak ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from laboratory.ranks import backend, own_port

GRACE = 2.0
"""Seconds that a child has to end in."""

Work = Callable[[], dict[str, Any]]


def one_rank() -> None:
    """Make this process rank 0 of 1, and its libraries quiet."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(names)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TQDM_DISABLE"] = "1"


def in_child(work: Work, limit: float, memory: int, *, distributed: bool = True) -> dict[str, Any]:
    """Run ``work`` in a fork of this process.

    Args:
        work: what to do; its result must be JSON.
        limit: seconds, after which the child is killed.
        memory: bytes that the child may have.
        distributed: whether ``torch.distributed`` is initialized in it, with one rank.

    Returns:
        the result, or ``{"status": "timeout" or "crash", "reason": why}``.

    """
    with own_port() if distributed else contextlib.nullcontext() as port:
        return _in_child(work, limit, memory, port)


def _in_child(work: Work, limit: float, memory: int, port: int | None) -> dict[str, Any]:
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(work, writer, memory, port)
    os.close(writer)
    try:
        text = _receive(reader, time.monotonic() + limit)
    finally:
        os.close(reader)
        status = _end(child)
    if text is None:
        return {"status": "timeout", "reason": f"not done after {limit:.0f} s"}
    if not text:
        return {"status": "crash", "reason": f"the process ended with status {status}"}
    result: dict[str, Any] = json.loads(text)
    return result


def _end(child: int) -> int:
    """End a child, with time to end its own and to clean up; return its status."""
    os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _child(work: Work, writer: int, memory: int, port: int | None) -> None:
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        if not os.environ.get("ZOO_DEBUG"):
            os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        import torch

        torch.set_num_threads(1)  # made anew after a fork: a race, once there are threads
        if port is not None:
            os.environ["MASTER_PORT"] = str(port)
            import deepspeed

            deepspeed.init_distributed(backend(), verbose=False)
        try:
            row = work()
        except BaseException as error:
            if os.environ.get("ZOO_DEBUG"):
                import traceback

                traceback.print_exc()
            row = {"status": "crash", "reason": f"{type(error).__name__}: {error!s}"[:300]}
        data = json.dumps(row).encode()
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _receive(reader: int, deadline: float) -> str | None:
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            return None
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return data.decode()
        data += chunk
    return None
