"""Run a model on stand-ins for its parameters and buffers, and leave it exactly as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from safe_rope.autocast.safety.contents import contents_kept
from safe_rope.autocast.safety.stand_ins import StandIns

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
    buffers: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_put_back, kept)
        stack.enter_context(contents_kept(value for _, held in kept for value in held.values()))
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


def _put_back(kept: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, attributes in kept:
        module.__dict__.clear()
        module.__dict__.update(attributes)


def _replace(tensors: Any, make: Callable[[Any], Any], made: dict[int, Any]) -> None:
    for name, tensor in list(tensors.items()):
        if tensor is not None:
            if id(tensor) not in made:
                made[id(tensor)] = make(tensor)
            tensors[name] = made[id(tensor)]
