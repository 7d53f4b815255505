"""Operators as torch dispatches them below autograd: run each, tell its name and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from safe_rope._base.torch_private import FakeTensor, TorchDispatchMode

Operator = Any
"""A `torch._ops.OpOverload`, which torch does not export."""

_DEVICE = torch.ops.prim.device.default
_MEMORY = frozenset({"numpy", "tolist", "data_ptr", "__array__", "__dlpack__"})


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, ``run(operator, arguments, keywords)`` takes the place of every operator of this thread."""

    def __init__(self, run: Callable[..., Any], higher_order: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self.supports_higher_order_operators = higher_order

    def __torch_dispatch__(self, func: Operator, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two of three calls, and no operator
            return FakeTensor.__torch_dispatch__(func, types, args, kwargs)
        return self._run(func, args, kwargs or {})


class MemoryReads(TorchFunctionMode):
    """While open, what reads the memory of a tensor past the operators reads a number of it by one, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _MEMORY and args[0].numel():
            args[0].as_strided((), ()).item()
        return func(*args, **(kwargs or {}))


def is_operator(func: Any) -> bool:
    """Whether ``func`` has a schema; one of higher order (torch.cond), which takes functions, has none."""
    return hasattr(func, "_schema")


def packet(operator: Operator) -> str:
    """Return the operator's name without namespace and overload: ``embedding``."""
    return str(operator._schema.name).rpartition("::")[2]


def named_arguments(operator: Operator, arguments: Any, keywords: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of the operator's schema with its value, None where it is left out."""
    for index, argument in enumerate(operator._schema.arguments):
        yield argument, arguments[index] if index < len(arguments) else keywords.get(argument.name)
