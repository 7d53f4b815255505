"""Numbers beside tensors that a constructor has taken out of those: of Python, or in NumPy's arrays.

No cast reaches them, but a constructor that computes in 16 bits gives rounded ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from safe_rope._recognition.reference import Reference
from safe_rope._recognition.tables import is_array, is_no_position


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
        if not (_are_numbers(meant) and _are_numbers(now)) or _is_same(now, meant):
            continue
        if is_array(meant) and is_no_position(name):
            continue
        if any(_is_same(vars(replay).get(name), now) for replay in reference.replayed_modules()):
            yield name, copy.copy(meant)  # the next module with the same arguments has its own


def numbers(value: Any) -> torch.Tensor | None:
    """Return the floats that an attribute is, or that its list, tuple or array holds; else None."""
    if not _are_numbers(value):
        return None
    if is_array(value):
        return torch.from_numpy(value.astype("float64", order="C"))
    held = [value] if type(value) is float else list(value)
    return torch.tensor(held, dtype=torch.float64, device="cpu")


def _are_numbers(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) > 0 and all(type(one) is float for one in value)
    return type(value) is float or is_array(value)


def _is_same(one: Any, other: Any) -> bool:
    if is_array(one) and is_array(other):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and not is_array(one) and bool(one == other)
