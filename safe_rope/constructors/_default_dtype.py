"""Sections of several threads that each need a default dtype, which belongs to the process.

Threads that need the same one share it; one that needs another waits for its turn. No lock is held while a
section runs, so that its code may start a thread, build modules there and wait for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from safe_rope._base.threads import running_frames

_INTERVAL = 0.01
_PATIENCE = 10.0
"""Seconds after which a section of another thread is taken to wait for this one, unseen."""
_WAITING = frozenset({"wait", "join", "_wait_for_tstate_lock"})


class _Section(NamedTuple):
    """The default dtype that a thread needs, and whether it has it or waits for its turn."""

    dtype: torch.dtype
    active: bool


_changed = threading.Condition()
_sections: dict[int, _Section] = {}
"""Of each thread, in the order of their coming."""
_outside = torch.float32
"""The process's own default dtype, as long as there are sections."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Set the default dtype for what this thread does inside; yield the one that it has outside. Nests.

    Raises:
        RuntimeError: a section of another thread that needs FP32 does not end, and ``dtype`` is another.
    """
    global _outside
    me = threading.get_ident()
    with _changed:
        nested, current = me in _sections, torch.get_default_dtype()
        if not _sections:
            _outside = current
        before = current if nested else _outside
        _sections[me] = _Section(dtype, active=False)
    try:
        with _changed:
            if not _take_turn(me, dtype) and dtype != torch.float32:
                raise RuntimeError(
                    f"expected to compute with {dtype} by default, but another thread has kept {current} for "
                    f"{_PATIENCE:.0f} s; build modules in one thread at a time"
                )
            _compute_under(me, dtype)
        yield before
    finally:
        with _changed:
            try:
                if nested:
                    _take_turn(me, before)
            finally:
                _compute_under(me, before) if nested else _leave(me)


def _take_turn(me: int, dtype: torch.dtype) -> bool:
    """Wait until nobody who came earlier needs another dtype; return whether that came about."""
    del _sections[me]
    _sections[me] = _Section(dtype, active=False)  # the last; it computes nothing that another could disturb
    _changed.notify_all()
    end = time.monotonic() + _PATIENCE
    while _must_wait(me, dtype):
        if time.monotonic() > end:
            return False
        _changed.wait(_INTERVAL)
    return True


def _must_wait(me: int, dtype: torch.dtype) -> bool:
    earlier = itertools.takewhile(lambda entry: entry[0] != me, _sections.items())
    return any(
        section.dtype != dtype and not (section.active and _waits(thread)) for thread, section in earlier
    )


def _compute_under(me: int, dtype: torch.dtype) -> None:
    _sections[me] = _Section(dtype, active=True)
    torch.set_default_dtype(dtype)


def _leave(me: int) -> None:
    del _sections[me]
    others = [section.dtype for section in _sections.values() if section.active]
    if not others:
        torch.set_default_dtype(_outside)
    elif torch.get_default_dtype() not in others:
        torch.set_default_dtype(others[-1])
    _changed.notify_all()


def _waits(thread: int) -> bool:
    """Whether a thread computes nothing now: it has ended, or it waits for another, maybe for this one."""
    frame = running_frames().get(thread)
    if frame is None:
        return True
    return frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name in _WAITING
