"""Sections that a signal does not break up: what its handler raises is raised when they have ended.

Python runs the handlers of signals in the main thread, after any call. An exception from one of them between
a change of something global and the ``try`` that undoes it leaves that change behind. In a section the first
signal of each number waits, and its handler runs at the section's end. The second one does not wait: whoever
sends two does not want to wait. Sections nest; in other threads they are nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import sys
import threading
from types import FrameType
from typing import Any

_SENT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")
"""By users, schedulers and timers. Only those are held up that have a handler in Python."""
# `_signal` is used past `signal`, which looks each handler up among its enumerations: six times the price.
_NUMBERS = tuple(int(getattr(signal, name)) for name in _SENT if hasattr(signal, name))

_depth = 0
_handlers: dict[int, Any] = {}
_waiting: list[int] = []


class uninterrupted(contextlib.ContextDecorator):  # noqa: N801 - reads as torch.no_grad does
    """A section: ``with uninterrupted(): ...``, or a decorator of a function that is one."""

    _entered = False

    def _recreate_cm(self) -> uninterrupted:
        return uninterrupted()

    def __enter__(self) -> None:
        global _depth
        if not _in_main_thread():
            return
        if not _depth:
            try:
                _hold_up()
            except BaseException:
                _put_back()
                raise
        # No call follows, and so no handler runs before what is inside begins.
        _depth += 1
        self._entered = True

    def __exit__(self, *_: object) -> None:
        global _depth
        if not self._entered:
            return
        self._entered = False
        _depth -= 1
        if not _depth:
            try:
                _put_back()
            finally:
                _run_waiting()


def run_waiting() -> None:
    """Run the handlers of signals that have come meanwhile: a point at which a long section may end."""
    if _in_main_thread():
        _run_waiting()


def _in_main_thread() -> bool:
    # current_thread() would leave an entry for a thread that C++ has started.
    return threading.get_ident() == threading.main_thread().ident


def _hold_up() -> None:
    for number in _NUMBERS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _wait:
            _handlers[number] = handler
            _signal.signal(number, _wait)


def _wait(number: int, frame: FrameType | None) -> None:
    if number in _waiting and number in _handlers:
        _handlers[number](number, frame)
    else:
        _waiting.append(number)


def _put_back() -> None:
    try:
        for number, handler in list(_handlers.items()):
            if _signal.getsignal(number) is _wait:
                _signal.signal(number, handler)
        _handlers.clear()
    except BaseException:  # the first handler that is back may run, and raise, before the last one is
        _put_back()
        raise


def _run_waiting() -> None:
    try:
        while _waiting:
            number = _waiting.pop(0)
            handler = _handlers.get(number) or signal.getsignal(number)
            if callable(handler):
                handler(number, sys._getframe())
    finally:
        if _waiting:
            _run_waiting()
