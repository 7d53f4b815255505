"""The modules of a model, each once: those that compare equal too, and those that nobody has registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from safe_rope._recognition.holdings import OF_TORCH, inside

_DEEPEST = 3
"""Containers, objects and closures within each other."""


class Part(NamedTuple):
    """A module of a model.

    Attributes:
        path: where it is in the model.
        module: what is there.
        parent: what holds it; itself for a model that nothing holds.
        root: the model, or what nobody has registered and it is in.
        within: its path from there.

    """

    path: str
    module: nn.Module
    parent: nn.Module
    root: nn.Module
    within: str


def parts(model: nn.Module) -> Iterator[Part]:
    """Yield the parts of a model, and after them those without parameters that nobody has registered.

    Attributes past ``__setattr__``, containers, objects, partial functions and closures hold such: what is
    cast, moved or saved leaves them out.
    """
    seen: set[int] = set()
    registered = list(_registered(model, model, model, "", "", seen))
    yield from registered
    for part in registered:
        for name, kept in _kept(part.module):
            if id(kept) not in seen and next(kept.parameters(), None) is None:
                yield from _registered(kept, part.module, kept, _below(part.path, name), "", seen)


def _registered(
    module: nn.Module, parent: nn.Module, root: nn.Module, path: str, within: str, seen: set[int]
) -> Iterator[Part]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield Part(path, module, parent, root, within)
    for name, child in module._modules.items():
        if child is not None:
            yield from _registered(child, module, root, _below(path, name), _below(within, name), seen)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kept(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module).__module__.startswith("torch.jit."):
        return  # it holds itself, as TorchScript knows it
    for name, value in list(vars(module).items()):
        if name not in OF_TORCH:
            yield from _modules_in(module, name, value, 0)


def _modules_in(holder: nn.Module, name: str, value: Any, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    elif depth < _DEEPEST:
        for key, inner in inside(holder, name, value):
            yield from _modules_in(holder, f"{name}.{key}", inner, depth + 1)
