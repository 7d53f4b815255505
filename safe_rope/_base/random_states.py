"""The random states of a process, kept while somebody's code runs for its answer alone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def random_states() -> tuple[Any, Any, torch.Tensor]:
    """Return the random states of Python, of NumPy where that is there, and of torch on CPU."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), numpy.get_state() if numpy is not None else None, torch.get_rng_state()


def set_random_states(states: tuple[Any, Any, torch.Tensor]) -> None:
    """Put back what `random_states` has returned."""
    random.setstate(states[0])
    if states[1] is not None:
        numpy: Any = sys.modules["numpy.random"]
        numpy.set_state(states[1])
    torch.set_rng_state(states[2])


@contextlib.contextmanager
def random_states_kept(device: str | torch.device | None = "cpu") -> Iterator[None]:
    """Put the random states of torch, Python and NumPy back at the end.

    Args:
        device: where numbers may be drawn besides the CPU; None where that is not known.

    """
    before = random_states()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(device)):
            yield
    finally:
        set_random_states(before)


def _cuda_devices(device: str | torch.device | None) -> list[int]:
    in_use: Any = torch.cuda.is_initialized
    if device is None and not in_use():
        return []
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda" or not torch.cuda.is_available():  # fake tensors need no GPU
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]
