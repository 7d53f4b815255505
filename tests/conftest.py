"""What every test leaves behind for DeepSpeed is taken away again."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_rank import set_imports_aside

SHARED_MEMORY = Path("/dev/shm")
# A process that was started a moment ago has made its file and may not have mapped it yet.
YOUNG = 30.0

# Looking for garbage takes a fifth of the time of the imports, which make none.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run last what trains with the engine: DeepSpeed keeps the model of a ZeRO-3 engine alive for good.

    Others watch what happens when the last protected model of the process is gone.
    """
    items.sort(key=lambda item: "autocast" in item.path.parts)


def pytest_collection_finish() -> None:
    """By now the tests' modules have imported most of what they need."""
    set_imports_aside()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def shared_memory_is_given_back() -> Iterator[None]:
    """Remove the 69 MB that each process with DeepSpeed's CPU collectives leaves in memory for good."""
    yield
    left = [
        file
        for file in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*")
        if time.time() - file.stat().st_mtime > YOUNG
    ]
    if left:
        in_use = mapped_files()
        for file in left:
            if str(file) not in in_use:
                file.unlink(missing_ok=True)


def mapped_files() -> set[str]:
    """Return the files in shared memory that some process of this machine has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = maps.read_text().splitlines()
            found |= {line.split()[-1] for line in lines if str(SHARED_MEMORY) in line}
    return found
