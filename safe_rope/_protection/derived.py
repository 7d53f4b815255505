"""Derive a class from a stock one, so that an instance of the stock class can be given it."""

from __future__ import annotations

import abc
from typing import Any


def derived(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    """Make a class that the stock's metaclass does not hear of, which may enter each into a registry."""
    metaclass: Any = type(bases[-1])
    plain: Any = next(cls for cls in metaclass.__mro__ if cls in (abc.ABCMeta, type))
    made = plain.__new__(metaclass, name, bases, namespace)
    if _layout(made) is _layout(bases[-1]):
        return made
    # A stock class whose first base has no __dict__ (an ABC, a Generic) has another layout than torch's
    # modules. A class takes that of the first of its bases, so the stock one stands there, not in the order.
    order, stock_first = made.__mro__[1:], bases[::-1]

    def mro(cls: Any) -> list[type]:
        return [cls, *order] if cls.__bases__ == stock_first else metaclass.mro(cls)

    ordered: Any = type(metaclass.__name__, (metaclass,), {"mro": mro})
    return plain.__new__(ordered, name, stock_first, namespace)


def _layout(cls: Any) -> Any:
    """Return the base of the class that made the instances as wide as they are; Python compares those."""
    while cls.__basicsize__ == cls.__base__.__basicsize__:
        cls = cls.__base__
    return cls.__base__
