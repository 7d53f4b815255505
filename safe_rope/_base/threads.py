"""What each thread runs now."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.RLock()  # two that meet leave the collector as it was


def running_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its ident.

    Python up to 3.11.8 makes them under its lock on the list of threads. A garbage collection within may hand
    the interpreter to a thread that begins or ends. That one waits for the lock, and all for that one, for
    good (python/cpython#106883). None runs here.
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
