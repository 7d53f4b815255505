"""The tensors in a value, an operator's arguments or a function's result; and whether two are one memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def tensors(value: Any, *, everywhere: bool = True) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, however deeply tuples, lists and dicts hold them, in order.

    ``everywhere``: look into sets and dataclasses, too.
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


def is_shared(one: Any, other: Tensor) -> bool:
    """Whether ``one`` is a plain tensor or a parameter with values, in the memory of ``other``."""
    if type(one) not in (Tensor, nn.Parameter) or one.is_meta or one.device != other.device:
        return False
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
