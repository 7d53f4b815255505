"""Rows of a table beyond those that its constructor makes."""

from __future__ import annotations

from torch import Tensor

from safe_rope._base.dtypes import low_dtype_of
from safe_rope._recognition.waves import are_sampled_sines

NOT_CONTINUED = "its rows beyond those that its constructor makes do not go on as those do"


def goes_on(table: Tensor, made: Tensor) -> bool:
    """Whether the rows that a table has beyond those that its constructor makes may go on as those do.

    Sampled sines go on as sines, and 32 bits are not followed by rows that were rounded to 16.
    """
    at = next((dim for dim, rows in enumerate(made.shape) if table.shape[dim] > rows), None)
    if at is None or table.is_meta or not table.is_floating_point():
        return True
    whole, first = (one.detach().cpu().float().movedim(at, 0).flatten(1) for one in (table, made))
    if low_dtype_of(whole[len(first) :]) is not None and low_dtype_of(first) is None:
        return False
    return not are_sampled_sines(first) or are_sampled_sines(whole)
