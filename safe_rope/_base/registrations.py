"""Hear of modules, buffers and parameters as they are registered, while other threads build modules too.

torch's own functions for that write to a dictionary that every thread iterates over while it builds a module,
and such a thread then raises. Here a new dictionary takes the place of the old one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.modules.module as torchs
from torch.utils.hooks import RemovableHandle

from safe_rope._base.torch_private import BUFFER_HOOKS, MODULE_HOOKS, PARAMETER_HOOKS

_lock = threading.RLock()


class _Hooks:
    """One of torch's dictionaries of global hooks, by the name that it has in torch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ours: dict[int, Callable[..., Any]] = {}
        self.original: OrderedDict[int, Callable[..., Any]] | None = None

    def add(self, hook: Callable[..., Any]) -> int:
        with _lock:
            live = getattr(torchs, self.name)
            if not self.ours:
                self.original = live
            changed = OrderedDict(live)
            key = RemovableHandle(changed).id
            changed[key] = self.ours[key] = hook
            setattr(torchs, self.name, changed)
        return int(key)

    def remove(self, key: int) -> None:
        with _lock:
            del self.ours[key]
            live = getattr(torchs, self.name)
            changed = OrderedDict((k, hook) for k, hook in live.items() if k != key)
            if not self.ours and self.original is not None:
                # The object that was there before, with what others have added to ours meanwhile.
                self.original.update({k: hook for k, hook in changed.items() if k not in self.original})
                changed, self.original = self.original, None
            setattr(torchs, self.name, changed)


_MODULES = _Hooks(MODULE_HOOKS)
_BUFFERS = _Hooks(BUFFER_HOOKS)
_PARAMETERS = _Hooks(PARAMETER_HOOKS)


def on_module(hook: Callable[..., Any]) -> Callable[[], None]:
    """Call ``hook(parent, name, child)`` before a module is registered; return what ends that."""
    key = _MODULES.add(hook)
    return lambda: _MODULES.remove(key)


def on_buffer(hook: Callable[..., Any]) -> Callable[[], None]:
    """Call ``hook(module, name, buffer)`` before a buffer is registered or set; return what ends that."""
    key = _BUFFERS.add(hook)
    return lambda: _BUFFERS.remove(key)


@contextmanager
def on_parameter(hook: Callable[..., Any]) -> Iterator[None]:
    """Call ``hook(module, name, parameter)`` before a parameter is registered; it may return another."""
    key = _PARAMETERS.add(hook)
    try:
        yield
    finally:
        _PARAMETERS.remove(key)
