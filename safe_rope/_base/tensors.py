"""The tensors in a value: an operator's arguments, a function's result, a model's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, however deeply containers and dataclasses hold them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry)
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from tensors(entry)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name, None))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, in order.

    Nothing else is looked into: the memo of ``Tensor.__deepcopy__`` holds objects of any kind.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
