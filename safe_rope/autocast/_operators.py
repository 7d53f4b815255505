"""Operators as torch dispatches them below autograd: run each, tell its name and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from safe_rope._base.torch_private import TorchDispatchMode

Operator = Any
"""A `torch._ops.OpOverload`, which torch does not export."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, ``run(operator, arguments, keywords)`` takes the place of every operator of this thread."""

    def __init__(self, run: Callable[..., Any], higher_order: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self.supports_higher_order_operators = higher_order

    def __torch_dispatch__(self, func: Operator, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def packet(operator: Operator) -> str:
    """Return the operator's name without namespace and overload: ``embedding``."""
    return str(operator._schema.name).rpartition("::")[2]


def named_arguments(operator: Operator, arguments: Any, keywords: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of the operator's schema with its value, None where it is left out."""
    for index, argument in enumerate(operator._schema.arguments):
        yield argument, arguments[index] if index < len(arguments) else keywords.get(argument.name)
