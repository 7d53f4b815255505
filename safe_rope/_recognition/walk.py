"""The modules of a model, each once: those that compare equal too, and those that nobody has registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from safe_rope._recognition.holdings import OF_TORCH, inside

_DEEPEST = 3
"""Containers, objects and closures within each other."""
_MOST = 100_000
"""Values in them that one walk looks at, those that are not deep first."""


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
    cast, moved or saved leaves them out. A weak proxy is none, whatever it stands for.
    """
    seen: set[int] = set()
    registered = list(_registered(model, model, model, "", "", seen))
    yield from registered
    for part, name, kept in _kept(registered):
        is_whole = "_modules" in vars(kept)  # a constructor may not have called that of torch
        if is_whole and id(kept) not in seen and next(kept.parameters(), None) is None:
            yield from _registered(kept, part.module, kept, _below(part.path, name), "", seen)


def within(model: nn.Module) -> dict[int, nn.Module]:
    """Return what ``model.modules()`` yields, by id; its generators in each other take four times as long."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            if module._modules:
                waiting += [*module._modules.values()][::-1]
    return found


def _registered(
    module: nn.Module, parent: nn.Module, root: nn.Module, path: str, within: str, seen: set[int]
) -> Iterator[Part]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield Part(path, module, parent, root, within)
    for name, child in module._modules.items():
        if _is_module(child):
            yield from _registered(child, module, root, _below(path, name), _below(within, name), seen)


def _is_module(value: object) -> TypeGuard[nn.Module]:
    """Whether a value is a module itself: ``isinstance`` asks what a weak proxy stands for."""
    return issubclass(type(value), nn.Module)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class _Held(NamedTuple):
    holder: Part
    name: str
    value: Any


def _kept(registered: Iterable[Part]) -> Iterator[tuple[Part, str, nn.Module]]:
    held = [
        _Held(part, name, value)
        for part in registered
        # A scripted module holds itself, as TorchScript knows it.
        if not type(part.module).__module__.startswith("torch.jit.")
        for name, value in list(vars(part.module).items())
        if name not in OF_TORCH
    ]
    left, looked = _MOST, set[tuple[int, str]]()
    for _ in range(_DEEPEST):
        yield from _modules(held)
        held = list(islice(_within(held, looked), left))
        left -= len(held)
    yield from _modules(held)


def _modules(held: list[_Held]) -> Iterator[tuple[Part, str, nn.Module]]:
    for holder, name, value in held:
        if _is_module(value):
            yield holder, name, value


def _within(held: list[_Held], looked: set[tuple[int, str]]) -> Iterator[_Held]:
    """Yield what is in what is held, once for all holders of one file, to which the same is open."""
    for holder, name, value in held:
        key = id(value), type(holder.module).__module__
        if key not in looked and not _is_module(value):
            for inner, one in inside(holder.module, name, value):
                looked.add(key)
                yield _Held(holder, f"{name}.{inner}", one)
