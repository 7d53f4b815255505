"""Run a model on stand-ins for its parameters and buffers, and leave it exactly as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from safe_rope.autocast.safety.stand_ins import StandIns

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def borrowed(model: nn.Module, stand_ins: StandIns, training: bool | None) -> Iterator[None]:
    """Put stand-ins in the place of parameters and buffers; on exit every module is restored.

    What ``forward`` binds to a module, or puts into a list or dict that a module holds, is taken away again.
    DeepSpeed's own hooks, which gather partitioned parameters, are off meanwhile. Every module is in the mode
    ``training``; None leaves each in its own.
    """
    modules = list(model.modules())
    kept = [(module, dict(vars(module))) for module in modules]
    containers = [
        value for _, held in kept for value in held.values() if isinstance(value, dict | list | set)
    ]
    entries = [_entries(container) for container in containers]
    buffers: dict[int, Any] = {}
    try:
        for module in modules:
            # DeepSpeed's dict of parameters wants to gather each that is taken out of it.
            module.__dict__["_parameters"] = dict(module._parameters.items())
            _replace(module._parameters, stand_ins.parameter, {})
            _replace(module._buffers, functools.partial(stand_ins.value, own=True), buffers)
            for kind in _HOOKS:
                hooks: dict[int, Any] = module.__dict__.get(kind) or {}
                for key, hook in list(hooks.items()):
                    if str(getattr(hook, "__module__", "")).startswith("deepspeed."):
                        del hooks[key]
            if training is not None:
                module.__dict__["training"] = training
        yield
    finally:
        for container, before in zip(containers, entries, strict=True):
            if list(map(id, _entries(container))) != list(map(id, before)):
                _refill(container, before)
        for module, attributes in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _replace(tensors: Any, make: Callable[[Any], Any], made: dict[int, Any]) -> None:
    for name, tensor in list(tensors.items()):
        if tensor is not None:
            if id(tensor) not in made:
                made[id(tensor)] = make(tensor)
            tensors[name] = made[id(tensor)]


def _entries(container: Any) -> list[Any]:
    """What a dict (its keys, then their values), list or set holds."""
    values = (value for _, value in container.items()) if isinstance(container, dict) else ()
    return [*container, *values]


def _refill(container: Any, entries: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        half = len(entries) // 2
        for key, value in zip(entries[:half], entries[half:], strict=True):
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(entries)
