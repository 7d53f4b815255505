"""The tensors in a value: an operator's arguments, a function's result, a model's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors(value: Any, *, everywhere: bool = True) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, however deeply tuples, lists and dicts hold them, in order.

    Args:
        value: anything.
        everywhere: look into sets and dataclasses, too.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry, everywhere=everywhere)
    elif isinstance(value, list | tuple) or (everywhere and isinstance(value, set | frozenset)):
        for entry in value:
            yield from tensors(entry, everywhere=everywhere)
    elif everywhere and hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name, None))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a torch function mode sees.

    The memo of ``Tensor.__deepcopy__`` holds objects of any kind, which are not looked into.
    """
    return tensors(value, everywhere=False)
