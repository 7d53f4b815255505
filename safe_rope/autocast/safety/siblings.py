"""Reach the modules that the example input does not: call them as their siblings are called.

A mixture of experts sends a few tokens to a few experts. The others are modules of the same class in the same
list, so that what a step does with them is seen by giving them what a sibling got.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def unreached_siblings(model: nn.Module, unused: set[str], called: set[str]) -> dict[str, list[str]]:
    """Return, for modules that were ``called``, the paths of those with ``unused`` parameters like them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    plan: dict[str, list[str]] = {}
    for name in sorted(unused):
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path in called:
                continue
            sibling = _called_sibling(modules, parts[:depth], called)
            if sibling is not None:
                if path not in plan.setdefault(sibling, []):
                    plan[sibling].append(path)
                break
    return plan


def _called_sibling(modules: dict[str, nn.Module], parts: list[str], called: set[str]) -> str | None:
    own = modules[".".join(parts)]
    for place in range(len(parts) - 1, -1, -1):
        container = modules[".".join(parts[:place])]
        if not isinstance(container, nn.ModuleList | nn.ModuleDict):
            continue
        for other in container._modules:
            path = ".".join([*parts[:place], other, *parts[place + 1 :]])
            if path in called and type(modules.get(path)) is type(own):
                return path
    return None


@contextlib.contextmanager
def called_like(model: nn.Module, plan: dict[str, list[str]]) -> Iterator[set[str]]:
    """While open, call the modules of ``plan`` whenever their sibling is; yield the paths that answered."""
    modules = dict(model.named_modules(remove_duplicate=False))
    answered: set[str] = set()
    handles = []
    for sibling, others in plan.items():

        def call(_: nn.Module, args: Any, kwargs: Any, others: list[str] = others) -> None:
            for other in others:
                try:
                    modules[other](*args, **kwargs)
                except Exception:  # it stays unused, and so unsafe
                    logger.debug("%s cannot be called as its sibling", other, exc_info=True)
                else:
                    answered.add(other)

        handles.append(modules[sibling].register_forward_pre_hook(call, with_kwargs=True))
    try:
        yield answered
    finally:
        for handle in handles:
            handle.remove()
