"""Run a model on stand-ins for its parameters and buffers, and leave it exactly as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from safe_rope.autocast.safety.stand_ins import StandIns

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextlib.contextmanager
def borrowed(
    model: nn.Module,
    stand_ins: StandIns,
    training: bool | None,
) -> Iterator[None]:
    """Put stand-ins in the place of parameters and buffers; on exit every module is as before.

    What ``forward`` binds to a module, or puts into a list or dict that a module holds, is taken away again.
    DeepSpeed's own hooks, which gather partitioned parameters, are off meanwhile.

    Args:
        model: the model.
        stand_ins: makes them.
        training: the mode that every module is in meanwhile; None leaves each in its own.

    """
    modules = list(model.modules())
    kept = [(module, *_state(module)) for module in modules]
    buffers: dict[int, Any] = {}
    try:
        for module in modules:
            # DeepSpeed's dict of parameters wants to gather each that is taken out of it.
            module.__dict__["_parameters"] = dict(module._parameters.items())
            _replace(module._parameters, stand_ins.parameter, {})
            _replace(module._buffers, stand_ins.buffer, buffers)
            _silence_deepspeed(module)
            if training is not None:
                module.__dict__["training"] = training
        yield
    finally:
        for module, attributes, containers in kept:
            for container, entries in containers:
                _refill(container, entries)
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _replace(tensors: Any, make: Callable[[Any], Any], made: dict[int, Any]) -> None:
    for name, tensor in list(tensors.items()):
        if tensor is not None:
            if id(tensor) not in made:
                made[id(tensor)] = make(tensor)
            tensors[name] = made[id(tensor)]


def _state(module: nn.Module) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    attributes = dict(vars(module))
    containers = [
        (value, list(value.items()) if isinstance(value, dict) else list(value))
        for value in attributes.values()
        if isinstance(value, dict | list | set)
    ]
    return attributes, containers


def _refill(container: Any, entries: list[Any]) -> None:
    if isinstance(container, dict):
        if not _same([part for pair in container.items() for part in pair], [p for e in entries for p in e]):
            container.clear()
            for key, value in entries:
                container[key] = value
    elif not _same(list(container), entries):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(entries)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _silence_deepspeed(module: nn.Module) -> None:
    for kind in _HOOKS:
        hooks: dict[int, Any] = module.__dict__.get(kind) or {}
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith("deepspeed."):
                del hooks[key]
