"""Times that are compared: those of calls that take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One comparison: ``ours`` against ``other``, seconds, of several rounds that alternate.

    ``noise`` is how far the ratio strays from 1 where both are the same; a target is missed beyond it.
    """

    what: str
    against: str
    ours: float
    other: float
    target: float | None = None
    noise: float = 0.0

    @property
    def ratio(self) -> float:
        return self.ours / self.other

    @property
    def missed(self) -> bool:
        return self.target is not None and self.ratio > self.target + self.noise


def clock(device: str) -> Callable[[], float]:
    """Return the clock for ``device``, in seconds.

    One thread on the CPU is measured by the time that the process had: other programs' does not count.
    """
    alone = not device.startswith("cuda") and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def best_times(
    calls: list[Callable[[], Any]], device: str, seconds: float = 1.5, *, cold: bool = False
) -> list[float]:
    """Return the shortest time of each call; they take turns, so that a slow moment meets all of them.

    A GPU's own clock is read where ``cold``: what a program takes to launch is then no part of the time, as
    the cache is emptied meanwhile.

    Args:
        calls: what to time, after one call of each that compiles what there is to compile.
        device: on which they run.
        seconds: for all rounds; there are five at least.
        cold: whether a GPU's cache is emptied before each call.

    """
    best, now = [float("inf")] * len(calls), clock(device)
    # A GPU is busy with so many bytes for longer than a call takes to launch.
    flush = (
        torch.empty(1 << 32, dtype=torch.int8, device=device) if cold and device.startswith("cuda") else None
    )
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < (5 if flush is None else 20) or time.perf_counter() < end:
        for index, call in enumerate(calls):
            taken = _of_device(call, flush) if flush is not None else _of_program(call, device, now)
            best[index] = min(best[index], taken)
        rounds += 1
    return best


def _of_program(call: Callable[[], Any], device: str, now: Callable[[], float]) -> float:
    wait(device)
    start = now()
    call()
    wait(device)
    return now() - start


def _of_device(call: Callable[[], Any], flush: torch.Tensor) -> float:
    began, ended = _event(), _event()
    flush.zero_()
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def wait(device: str) -> None:
    """Wait for what a GPU is still doing."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
