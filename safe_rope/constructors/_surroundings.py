"""The surroundings in which position tables are computed: CPU, FP32 by default, no autocast."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from safe_rope._base.torch_private import (
    TRUE_CONSTRUCTORS,
    default_device_type,
    device_constructors,
    is_device_section,
    put_function_modes,
    take_function_modes,
)
from safe_rope.constructors._default_dtype import default_dtype


class _ThreadState(threading.local):
    depth: int = 0
    follow: bool = True
    outer_default: torch.dtype | None = None


thread = _ThreadState()
"""``depth``: open pristine sections of this thread; ``outer_default``: the default dtype before; ``follow``:
whether what they make is followed until it becomes a parameter."""


def remember_device_constructors(names: Iterable[str]) -> None:
    """Tell torch that a ``torch.device`` context redirects the true constructors of these ``names``.

    torch asks once in a process which functions those are, and keeps the answer. Asked while zero.Init's
    wrappers stand there it remembers the wrappers, and no ``torch.device("meta")`` works any more, ever.
    """
    device_constructors().update(getattr(TRUE_CONSTRUCTORS, name) for name in names)


@contextmanager
def surroundings() -> Iterator[None]:
    """Make new tensors of this thread plain FP32 CPU tensors unless they ask for something else."""
    with ExitStack() as stack:
        outer = stack.enter_context(default_dtype(torch.float32))
        for device_type in _autocast_device_types():
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(_on_cpu())
        before, thread.depth = thread.outer_default, thread.depth + 1
        if outer != torch.float32:
            thread.outer_default = outer
        try:
            yield
        finally:
            thread.depth, thread.outer_default = thread.depth - 1, before


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Make tensors on CPU: every operation inside of ``torch.device(...)`` runs Python, so that is left."""
    modes = take_function_modes()
    only_devices = all(map(is_device_section, modes))
    if not only_devices:
        put_function_modes(modes)
    try:
        is_needed = not only_devices or default_device_type() != "cpu"
        with torch.device("cpu") if is_needed else nullcontext():
            yield
    finally:
        if only_devices:
            put_function_modes(modes)


def _autocast_device_types() -> set[str]:
    types = {"cpu", "cuda"}
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    try:
        current = accelerator.current_accelerator() if accelerator is not None else None
    except RuntimeError:  # torch 2.6 raises where there is none
        current = None
    return types | ({current.type} if current is not None else set())
