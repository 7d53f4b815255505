"""What a function holds besides its code: the filled cells of its closure, and its default values."""

from __future__ import annotations

import types
from typing import Any


def filled_cells(function: Any) -> list[types.CellType]:
    """Return the cells of a function's closure that have been assigned yet; none for what has no closure."""
    return [cell for cell in getattr(function, "__closure__", None) or () if cell != types.CellType()]


def default_values(function: types.FunctionType) -> list[Any]:
    """Return the default values of a function's arguments."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
