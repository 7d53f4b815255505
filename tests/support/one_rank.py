"""A process group of one, set up as DeepSpeed reads it from the environment."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

from _process import free_port


def set_aside() -> None:
    """Leave all that is alive by now out of garbage collections, for good.

    DeepSpeed collects garbage many times for an engine or a zero.Init, and so do tests; each time would go
    through every object of every imported module. What somebody holds at that moment, and drops later in a
    cycle, is never collected.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Say in the environment that this process is the only rank."""
    # Without LOCAL_SIZE DeepSpeed 0.14 asks the program numactl for the number of devices.
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
