"""The dtype that torch computes several tensors with, also for operations that promote nothing themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from safe_rope._base.tensors import mapped, tensors_in


def promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype that torch computes with; None where it refuses to mix them (8-bit floats)."""
    try:
        return functools.reduce(torch.promote_types, dtypes)
    except RuntimeError:
        return None


def run_promoted(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation; one that refuses to mix floating dtypes gets all in one.

    A matrix product promotes nothing: where zero.Init lowers both factors, it refuses a truthful one beside
    a lowered one. It gets both in the dtype that an elementwise product has; an operation that writes to an
    input gets the others in the dtype of that.

    Raises:
        RuntimeError: what the operation raises with the arguments as they were given.

    """
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        dtype = _written_to(func, args, kwargs) or promoted(dtypes) if len(set(dtypes)) > 1 else None
        if dtype is None:
            raise
        alike = mapped(lambda one: one.to(dtype) if one.is_floating_point() else one, (args, kwargs))
        with contextlib.suppress(RuntimeError):
            return func(*alike[0], **alike[1])
        raise


def _written_to(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of what an operation writes to; None for one that writes to no input."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    target = kwargs.get("out", args[0] if in_place and args else None)
    return target.dtype if isinstance(target, torch.Tensor) else None
