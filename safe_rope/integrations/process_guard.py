"""A guard that is open for as long as the process lives: says once what it protects, and keeps the report.

It speaks when a model is first called, not when its first module is built. By then the model is whole, the
paths of its modules are known, and training has not begun.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections import Counter
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from safe_rope._base.positions import is_watched
from safe_rope._base.text import counted
from safe_rope._base.version import installed
from safe_rope._protection import Guard, Tables
from safe_rope._protection.report import ModuleEntry, ProtectionReport, is_main_rank, warn_unprotected
from safe_rope.errors import UnsupportedModelError
from safe_rope.integrations import run_report
from safe_rope.integrations.options import Options


class ProcessGuard:
    """The guard of a process that did not open one itself."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._guard = Guard(cast(Tables, options.tables), built=self._on_built)
        self._pid = os.getpid()
        self._first_call: Any = None
        self._summarised = False
        self._warned: set[tuple[str, str]] = set()
        self._entries: dict[tuple[str, str, int], ModuleEntry] = {}
        self._lock = threading.RLock()

    def start(self) -> None:
        """Open the guard; it stays open."""
        self._guard.start()
        atexit.register(self._at_exit)

    def _on_built(self, module: nn.Module) -> None:
        with self._lock:
            self._pid = os.getpid()  # a fork that builds a model of its own tells of it
            if self._first_call is None:
                self._first_call = register_module_forward_pre_hook(self._on_call)

    def _on_call(self, module: nn.Module, arguments: Any) -> None:
        if is_watched():
            return  # a trace runs on tensors that hold nothing; the first call of its own comes after it
        with self._lock:
            if self._first_call is None:
                return
            self._first_call.remove()
            self._first_call = None
        self._settle()

    def _settle(self) -> None:
        report = self._so_far()
        unprotected = {(entry.path, entry.module_class) for entry in report.unprotected}
        if unprotected and self.options.strict:
            raise UnsupportedModelError(report.describe_unprotected())
        if unprotected - self._warned:
            self._warned |= unprotected
            warn_unprotected(report, stacklevel=5)
        if is_main_rank():
            if not self._summarised:
                _say(f"safe-rope: {_summary(report)}")
            self._summarised = True
            self._write(report, ended=False)

    def _so_far(self) -> ProtectionReport:
        """What was built until now, with what is gone by now."""
        report = self._guard.report
        counts: dict[tuple[str, str], int] = {}
        for entry in (*report.protected, *report.unprotected):
            kind = (entry.path, entry.module_class)
            counts[kind] = counts.get(kind, 0) + 1
            self._entries[entry.path, entry.module_class, counts[kind]] = entry
        report.protected = [entry for entry in self._entries.values() if entry.family]
        report.unprotected = [entry for entry in self._entries.values() if not entry.family]
        return report

    def _at_exit(self) -> None:
        # A fork runs this as well; it has nothing to tell unless it built a model.
        if os.getpid() != self._pid or not is_main_rank():
            return
        report = self._so_far()
        if report.protected or report.unprotected:
            self._write(report, ended=True)

    def _write(self, report: ProtectionReport, *, ended: bool) -> None:
        path = self.options.report
        if path is None:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        process = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "rank": int(os.environ.get("RANK") or 0),
            "argv": sys.argv,
            "python": sys.version.split()[0],
            "versions": installed(),
            "autocast": self.options.autocast,
            "ended": ended,
            "error": f"{type(error).__name__}: {error}" if error is not None else None,
            **report.to_dict(),
        }
        try:
            run_report.put(path, self.options.run, process)
        except OSError as failure:  # no reason to lose hours of training
            _say(f"safe-rope: the report cannot be written: {failure}")


def _say(line: str) -> None:
    """Write a line to stderr, above the progress bar if one stands there; nothing where stderr is closed."""
    write = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "write", print)
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            write(line, file=sys.stderr)
            sys.stderr.flush()


def _summary(report: ProtectionReport) -> str:
    kinds = Counter(entry.said(report.tables) for entry in report.protected)
    each = ", ".join(f"{number} {kind}" if len(kinds) > 1 else kind for kind, number in kinds.items())
    protected = f"{counted(len(report.protected), 'position module')} protected"
    unprotected = f", {len(report.unprotected)} NOT protected" if report.unprotected else ""
    return f"{protected}{f' ({each})' if each else ''}{unprotected}"
