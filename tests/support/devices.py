"""The device of the tests that need one besides the CPU: CUDA's, or a second one where there is no GPU."""

from __future__ import annotations

import functools
import os

import torch

from support import second_device

ASKED_FOR = "SECOND_DEVICE"
"""A variable of the environment: the tests of a process are to run on `second_device`."""
DEVICE = second_device.NAME if os.environ.get(ASKED_FOR) else "cuda"


@functools.cache
def is_there() -> bool:
    """Whether there is such a device, which is made if it is the second one."""
    if DEVICE == "cuda":
        return torch.cuda.is_available()
    second_device.install()
    return True
