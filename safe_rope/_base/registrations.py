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

import torch
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

    def add(self, hook: Callable[..., Any], key: int | None = None) -> int:
        with _lock:
            live = getattr(torchs, self.name)
            if not self.ours:
                self.original = live
            changed = OrderedDict(live)
            key = RemovableHandle(changed).id if key is None else key
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

_KEY_OF_BUFFERS = RemovableHandle(OrderedDict()).id
_hear_buffers: list[Callable[..., Any]] = []


def _tell_of_buffer(module: Any, name: str, buffer: Any) -> None:
    # Dynamo compiles this with a forward that sets a buffer, and anew for what else is read here.
    if not torch.compiler.is_dynamo_compiling():
        for hook in tuple(_hear_buffers):
            hook(module, name, buffer)


def on_module(hook: Callable[..., Any]) -> Callable[[], None]:
    """Call ``hook(parent, name, child)`` before a module is registered; return what ends that."""
    key = _MODULES.add(hook)
    return lambda: _MODULES.remove(key)


def on_buffer(hook: Callable[..., Any]) -> Callable[[], None]:
    """Call ``hook(module, name, buffer)`` before a buffer is registered or set; return what ends that.

    Not where Dynamo compiles. All hooks have one place among torch's, which compiled code knows.
    """
    with _lock:
        if not _hear_buffers:
            _BUFFERS.add(_tell_of_buffer, _KEY_OF_BUFFERS)
        _hear_buffers.append(hook)

    def stop() -> None:
        with _lock:
            _hear_buffers.remove(hook)
            if not _hear_buffers:
                _BUFFERS.remove(_KEY_OF_BUFFERS)

    return stop


@contextmanager
def on_parameter(hook: Callable[..., Any]) -> Iterator[None]:
    """Call ``hook(module, name, parameter)`` before a parameter is registered; it may return another."""
    key = _PARAMETERS.add(hook)
    try:
        yield
    finally:
        _PARAMETERS.remove(key)
