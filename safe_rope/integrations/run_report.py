"""The JSON report of a run: one file that several processes write to, whole at every moment."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from typing import Any

from safe_rope._base.files import write_atomically


def begin(path: str, run: str, command: list[str]) -> None:
    """Write the report of a run of which nothing is known yet; what the file held is replaced.

    Raises:
        OSError: it cannot be written.
    """
    _write(path, {"run": run, "command": command, "processes": []})


def put(path: str, run: str | None, process: dict[str, Any]) -> None:
    """Put what ``process`` tells into the report, in place of what it told before.

    A report of another run is replaced. Processes are told apart by host and pid.

    Raises:
        OSError: it cannot be written.
    """
    check(path)
    with _alone(os.path.dirname(os.path.realpath(path))):
        report = _read(path)
        if run is None or report.get("run") != run:
            report = {"run": run, "command": None, "processes": []}
        key = (process["host"], process["pid"])
        others = [entry for entry in report["processes"] if (entry.get("host"), entry.get("pid")) != key]
        _write(path, report | {"processes": [*others, process]})


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    except (OSError, ValueError):
        return {}
    known = isinstance(report, dict) and isinstance(report.get("processes"), list)
    return report if known else {}


def check(path: str) -> None:
    """Refuse what is no file that can be read and replaced.

    Raises:
        OSError: it is a device, a pipe or a folder.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is no regular file", path)


def _write(path: str, report: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Keep other processes from writing meanwhile; a lock on the folder leaves no file behind."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
