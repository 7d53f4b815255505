"""Run a model on stand-ins for its parameters and buffers, and leave it exactly as it was."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from safe_rope.autocast.safety.stand_ins import StandIns

_MOST = 100_000
"""Objects that modules hold, up to which what they hold in turn is looked into."""
_OTHERS = (
    *(type(None), bool, int, float, str, bytes, type, Tensor, nn.Module),
    *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def borrowed(model: nn.Module, stand_ins: StandIns, training: bool | None) -> Iterator[None]:
    """Put stand-ins in the place of parameters and buffers; on exit every module is restored.

    What ``forward`` binds to a module, or puts into a container or object that a module holds, however deep,
    is taken away again. DeepSpeed's own hooks, which gather partitioned parameters, are off meanwhile. Every
    module is in the mode ``training``; None leaves each in its own.
    """
    modules = list(model.modules())
    kept = [(module, dict(vars(module))) for module in modules]
    containers = [(container, _entries(container)) for container in _containers(kept)]
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
        for container, before in containers:
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


def _containers(kept: list[tuple[nn.Module, dict[str, Any]]]) -> Iterator[Any]:
    """Yield what can change of what modules hold: containers, and the dicts of objects.

    An object with a lock is left out, since other threads may use it meanwhile.
    """
    left = deque(value for _, held in kept for value in held.values())
    seen: dict[int, Any] = {}
    while left and len(seen) < _MOST:
        value = left.popleft()
        if id(value) in seen or isinstance(value, _OTHERS):
            continue
        seen[id(value)] = value
        if not isinstance(value, dict | list | set | deque | tuple):
            try:
                value = vars(value)
            except TypeError:
                continue
            if any(isinstance(held, _LOCKS) for held in value.values()):
                continue
        left.extend(_entries(value))
        if not isinstance(value, tuple):
            yield value


def _entries(container: Any) -> list[Any]:
    """What a dict (its keys, then their values) or another container holds."""
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
