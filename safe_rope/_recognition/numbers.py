"""Python numbers that a constructor has taken out of tensors: a ratio, or a list of frequencies.

No cast reaches them, but a constructor that computes in 16 bits gives rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from safe_rope._recognition.reference import Reference


def rounded_numbers(module: nn.Module, reference: Reference) -> Iterator[tuple[str, Any]]:
    """Yield each attribute with numbers that the constructor has computed in 16 bits, and what it means.

    Those are what the constructor gives under the conditions that it may have run in, and not with nothing
    intercepted.
    """
    built, own = reference.module, vars(module)
    if built is None or reference.plain or built is module:
        return
    for name, meant in vars(built).items():
        now = own.get(name)
        if numbers(meant) is None or numbers(now) is None or now == meant:
            continue
        if any(vars(replay).get(name) == now for replay in reference.replayed_modules()):
            yield name, meant


def numbers(value: Any) -> list[float] | None:
    """Return the floats that an attribute is, or is a list or tuple of; None where it is something else."""
    if type(value) is float:
        return [value]
    if type(value) in (list, tuple) and value and all(type(one) is float for one in value):
        return list(value)
    return None
