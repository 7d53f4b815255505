"""Everything in the process that a guard could have replaced, compared object by object."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

MODELLING = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "gpt_neox"))
APPLICATION = "apply_rotary_pos_emb"


def _namespaces() -> Iterator[tuple[str, Any]]:
    from deepspeed.runtime.zero import partition_parameters

    yield from (("torch", torch), ("Tensor", torch.Tensor), ("Module", nn.Module))
    yield from (("Parameter", nn.Parameter), ("UninitializedParameter", nn.UninitializedParameter))
    yield from (("nn.functional", torch.nn.functional), ("nn.init", torch.nn.init))
    for module in (partition_parameters, *(sys.modules[name] for name in MODELLING)):
        yield module.__name__, module
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield f"{module.__name__}.{name}", value


def snapshot() -> dict[str, Any]:
    """Every function, class and descriptor in the namespaces that a guard, zero.Init or a patch writes to."""
    found: dict[str, Any] = {}
    for label, namespace in _namespaces():
        for name, value in vars(namespace).items():
            if isinstance(value, ModuleType) or name in ("__annotations__", "__dict__", "__weakref__"):
                continue
            if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                found[f"{label}.{name}"] = value
    for name, hooks in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            found[name] = tuple(hooks.values())
    found["function modes"] = tuple(torch.overrides._get_current_function_mode_stack())
    found["default dtype"] = torch.get_default_dtype()
    return found


def replaced(before: dict[str, Any], *, but: str | None = None) -> list[str]:
    """Names whose object is not the one of ``before``; those that end in ``but`` do not count."""
    after = snapshot()
    return [
        name
        for name, value in before.items()
        if not (but and name.endswith(but))
        and after.get(name) is not value
        and not (isinstance(value, tuple) and after[name] == value)
    ]
