"""Interrupt the library at a chosen point, one of those where Python itself runs a signal's handler.

Python looks for signals after a call, at a function's beginning and where a loop goes back. `Injection`
traces the instructions of safe_rope, and of the context managers that it enters, counts these points, and
raises a signal at one of them.
"""

from __future__ import annotations

import dis
import functools
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

OURS = "/safe_rope/"
ITS_TOOLS = (
    "contextlib.py",
    "grad_mode.py",
    "overrides.py",
    "autocast_mode.py",
    "_device.py",
    "_contextlib.py",
)
"""Files whose functions count where safe_rope calls them."""


@functools.cache
def _is_ours(file: str) -> bool:
    return OURS in file and "/tests/" not in file and "/laboratory/" not in file


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions after which Python runs handlers."""
    names = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    return frozenset(
        one.offset
        for one in dis.get_instructions(code)
        if one.opname.startswith(names) and "INTR" not in one.opname
    )


class Injection:
    """Counts the points that a call passes; at the ``at``-th of them it sends ``number`` to this process."""

    def __init__(self, at: int | None = None, number: int = signal.SIGINT) -> None:
        self.at, self.number = at, number
        self.passed = 0
        self.where = ""
        self.places: dict[tuple[CodeType, int], list[int]] = {}

    def run(self, work: Callable[[], Any]) -> Any:
        """Call ``work``; return what it returns, or raise what the handler raises."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            return work()
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not _is_ours(file):
            caller = frame.f_back
            if not file.endswith(ITS_TOOLS) or caller is None or caller.f_trace is None:
                return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._tracer(_points(frame.f_code))

    def _tracer(self, points: frozenset[int]) -> Any:
        last = min(points, default=-1)  # a call has passed its function's beginning

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "opcode":
                if last in points:
                    self._pass(frame)
                last = frame.f_lasti
            return trace

        return trace

    def _pass(self, frame: FrameType) -> None:
        self.passed += 1
        if self.at is None:
            self.places.setdefault((frame.f_code, frame.f_lasti), []).append(self.passed)
        if self.passed == self.at:
            self.where = (
                f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
            )
            signal.raise_signal(self.number)
