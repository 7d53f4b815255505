"""The random states of a process, kept while somebody's code runs for its answer alone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def random_states_kept(device: str = "cpu") -> Iterator[None]:
    """Put the random states of torch, Python and NumPy back at the end."""
    numpy: Any = sys.modules.get("numpy.random")
    before = random.getstate(), numpy.get_state() if numpy is not None else None
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.set_state(before[1])
