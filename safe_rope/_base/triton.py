"""What every kernel in Triton asks before it is launched. Triton itself is imported only to launch one."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

import torch
from torch import Tensor

_HERE: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


@functools.cache
def available() -> bool:
    """Whether Triton is installed and can be imported."""
    try:
        importlib.import_module("triton.language")
    except Exception:  # noqa: BLE001 - a broken installation fails in any way
        return False
    return True


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: Triton decides that once."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch where ``x`` is; on the CPU for the tensors that Triton's interpreter takes."""
    if not x.is_cuda or torch.cuda.current_device() == x.get_device():
        return _HERE
    return torch.cuda.device(x.get_device())


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is ``n`` or more: the sizes that Triton's blocks have."""
    return 1 << max(n - 1, 0).bit_length()
