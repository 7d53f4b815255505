"""What a function takes, and what it holds besides its code: filled cells of its closure, default values."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

# CPython from 3.14 on evaluates annotations when somebody asks for them.
_ANNOTATIONS: dict[str, Any] = {}
if find_spec("annotationlib"):
    _ANNOTATIONS = {"annotation_format": import_module("annotationlib").Format.FORWARDREF}


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return the signature of a function, whose annotations may name what only a type checker imports.

    Raises:
        TypeError, ValueError: nothing says what it takes, as for many functions written in C.

    """
    return inspect.signature(function, follow_wrapped=follow_wrapped, **_ANNOTATIONS)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return what a call takes; for a module, into which a library has made a function, what forward takes.

    Raises:
        TypeError, ValueError: nothing says so, as for many functions written in C.

    """
    taken = function.forward if isinstance(function, nn.Module) else function
    return signature_of(taken).parameters


def filled_cells(function: Any) -> list[types.CellType]:
    """Return the cells of a function's closure that have been assigned yet; none for what has no closure."""
    return [cell for cell in getattr(function, "__closure__", None) or () if cell != types.CellType()]


def default_values(function: types.FunctionType) -> list[Any]:
    """Return the default values of a function's arguments."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
