"""Which tests are run, in which order, how long they take, and what none of them leaves behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from laboratory.ranks import backend
from support.durations import Durations, recorded
from support.one_rank import environment, set_aside

SHARED_MEMORY = Path("/dev/shm")
# A process that was started a moment ago has made its file and may not have mapped it yet.
YOUNG = 30.0
# Seconds that pytest-timeout has for ending a test itself.
GRACE = 60.0

# Looking for garbage takes a fifth of the time of the imports, which make none.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests that are marked exhaustive, too")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config.getoption("--record-durations")))
    # pytest-xdist would give out files by their number of tests, and not in the order that is made below.
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is exhaustive; put first what needs a fresh process, then what starts no engine.

    DeepSpeed keeps models of its engines alive, and with them the functions that those need. Of several
    processes that share the tests, each takes the longest file that is left, engines or not: what takes
    longest opens zero.Init, which goes through every class of modules that there is by then.
    """
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    seconds = {file: line["seconds"] for file, line in recorded().items()}
    shared = hasattr(config, "workerinput")  # by several processes, which get the files in this order

    def place(item: pytest.Item) -> tuple[bool, bool, float]:
        fresh = item.get_closest_marker("fresh") is not None
        if shared:
            return not fresh, False, 0.0 if fresh else -seconds.get(item.nodeid.partition("::")[0], 0.0)
        return not fresh, "deepspeed_group" in getattr(item, "fixturenames", ()), 0.0

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End a process that hangs in C, where no signal is handled, with its stacks."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what the tests need, most of which their modules have imported by now."""
    if any("deepspeed_group" in getattr(item, "fixturenames", ()) for item in session.items):
        import deepspeed
        import transformers.integrations.deepspeed  # noqa: F401

        deepspeed.logger.setLevel("ERROR")
    set_aside()
    gc.enable()


@pytest.fixture(scope="session")
def deepspeed_group() -> Iterator[None]:
    """A real process group of one."""
    import deepspeed

    with environment():
        deepspeed.init_distributed(backend())
        yield


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_is_set_aside() -> Iterator[None]:
    """Leave what a file's tests have left alive out of the collections of those of the next."""
    yield
    set_aside()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that another test has compiled, nor anything left for the next."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def linear_is_put_back() -> Iterator[None]:
    """Put back the function that ZeRO-3 replaces for good: its own rounds differently in FP32."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.nn.functional.linear = torch._C._nn.linear


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
