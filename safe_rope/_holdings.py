"""Where a module keeps its tensors: buffers, attributes, and one level into what it keeps that is no module.

A name with a dot is an entry of a list, tuple, dict or plain object: ``cache.0``, ``tables.cos``. Those
``nn.Module`` neither casts, moves nor saves, but what a constructor puts there is as wrong as its buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = frozenset({bool, int, float, str, type(None)})
_LONGEST = 256


def entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and value of everything that may be a tensor and is no parameter."""
    yield from module._buffers.items()
    for name, value in list(vars(module).items()):
        # Every module of a model is asked, and torch.Tensor answers isinstance slowly: the quick ones first.
        if name in _OF_TORCH or type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif _may_be_looked_into(module, name, value):
            for key, inner in _items(value):
                if isinstance(inner, torch.Tensor):
                    yield f"{name}.{key}", inner


def unfilled(module: nn.Module) -> list[str]:
    """Names of the buffers and attributes that are None."""
    places = [*module._buffers.items(), *vars(module).items()]
    return [name for name, value in places if value is None and name not in _OF_TORCH]


def is_inside(name: str) -> bool:
    """Whether ``name`` is of a tensor in a container, which nothing but the module's own code reaches."""
    return "." in name


def get_table(module: nn.Module, name: str) -> Any:
    """Return what `entries` calls ``name``, None where it is no more."""
    direct = module._buffers.get(name, vars(module).get(name))
    owner, _, key = name.partition(".")
    if direct is not None or not key:
        return direct
    return dict(_items(vars(module).get(owner))).get(key)


def set_table(module: nn.Module, name: str, value: Any) -> None:
    """Put a value where `get_table` finds it, past ``__setattr__``."""
    owner, _, key = name.partition(".")
    if name in module._buffers:
        module._buffers[name] = value
    elif not key:
        vars(module)[name] = value
    else:
        _put(module, owner, key, value)


def twin(module: nn.Module, stock: type[nn.Module]) -> nn.Module:
    """Return a ``stock`` with the module's attributes: what is assigned in one is not in the other."""
    other = stock.__new__(stock)
    attributes = {name: _apart(value) for name, value in vars(module).items() if name not in _OF_TORCH}
    vars(other).update(vars(module))
    vars(other).update(attributes)
    vars(other)["_buffers"] = dict(module._buffers)
    return other


def _may_be_looked_into(module: nn.Module, name: str, value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return 0 < len(value) <= _LONGEST
    if isinstance(value, SimpleNamespace):
        return True
    if not hasattr(value, "__dict__") or isinstance(value, nn.Module | type) or callable(value):
        return False
    # An object from the same file, which is no configuration. Engines and wrappers hold whole optimizers.
    return not name.endswith("config") and type(value).__module__ == type(module).__module__


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield str(index), inner
    elif isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                yield key, inner
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()


def _put(module: nn.Module, owner: str, key: str, value: Any) -> None:
    container = vars(module).get(owner)
    if isinstance(container, list):
        container[int(key)] = value
    elif isinstance(container, tuple):
        changed = [value if str(index) == key else inner for index, inner in enumerate(container)]
        made: Any = getattr(container, "_make", tuple)  # a named tuple stays one
        vars(module)[owner] = made(changed)
    elif isinstance(container, dict):
        container[key] = value
    elif container is not None:
        vars(container)[key] = value


def _apart(value: Any) -> Any:
    if isinstance(value, list | dict | SimpleNamespace):
        return copy.copy(value)
    return value
