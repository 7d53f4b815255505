"""Looking at what other threads run: no garbage is collected meanwhile, which Python 3.11 may not survive."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from torch import nn

from safe_rope._base.threads import running_frames
from safe_rope.autocast import reads
from safe_rope.constructors import _default_dtype


@contextmanager
def collections_within(function: Callable[..., Any]) -> Iterator[list[str]]:
    """Collect as often as Python can; yield those collections that run within ``function``, which is in C."""
    inside, seen, before = [False], [], (sys.getprofile(), gc.get_threshold())

    def profile(frame: FrameType, event: str, what: Any) -> None:
        if what is function and event.startswith("c_"):
            inside[0] = event == "c_call"

    def collected(phase: str, _: dict[str, int]) -> None:
        if inside[0]:
            seen.append(phase)

    gc.callbacks.append(collected)
    gc.set_threshold(1)
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(before[0])
        gc.set_threshold(*before[1])
        gc.callbacks.remove(collected)


def part_is_outermost() -> bool:
    model = nn.Sequential(nn.Linear(2, 2))
    return reads._is_outermost(model[0], model, reads._modules(model))


LOOKS: dict[str, Callable[[], Any]] = {
    "frames": running_frames,
    "a part of an engine's model": part_is_outermost,
    "a section of a default dtype": lambda: _default_dtype._waits(threading.get_ident()),
}


@contextmanager
def other_threads() -> Iterator[list[threading.Thread]]:
    """Some that wait, whose frames nobody has looked at."""
    go, there = threading.Event(), threading.Barrier(5)

    def waits() -> None:
        there.wait()
        go.wait()

    threads = [threading.Thread(target=waits) for _ in range(4)]
    for thread in threads:
        thread.start()
    there.wait()
    try:
        yield threads
    finally:
        go.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", LOOKS)
def test_no_garbage_is_collected_while_python_lists_the_threads(name: str, enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with other_threads(), collections_within(sys._current_frames) as seen:
            LOOKS[name]()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()
    assert not seen


def test_frames_are_those_of_all_threads() -> None:
    with other_threads() as threads:
        frames = running_frames()
        assert {thread.ident for thread in threads} <= frames.keys()
    assert frames[threading.get_ident()].f_code is running_frames.__code__
