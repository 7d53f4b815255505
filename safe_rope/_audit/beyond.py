"""Rows of a table beyond those that its constructor makes."""

from __future__ import annotations

from torch import Tensor

from safe_rope._base.dtypes import low_dtype_of
from safe_rope._base.tensors import in_real_numbers
from safe_rope._recognition.waves import EXACT, are_sampled_sines

NOT_CONTINUED = "its rows beyond those that its constructor makes do not go on as those do"
_PADDED = 2
"""Rows at the start of a table that may stand for padding, and hold zeros."""


def goes_on(table: Tensor, made: Tensor) -> bool:
    """Whether the rows that a table has beyond those that its constructor makes may go on as those do.

    Sampled sines go on as sines, and what rises or falls goes on so, or as sines. Rows in 32 bits are not
    followed by some that were rounded to 16, unless those are the last row again.
    """
    at = next((dim for dim, rows in enumerate(made.shape) if table.shape[dim] > rows), None)
    if at is None or table.is_meta or not (table.is_floating_point() or table.is_complex()):
        return True
    here = (in_real_numbers(one.detach()).cpu().float() for one in (table, made))
    whole, first = (one.movedim(at, 0).flatten(1) for one in here)
    rest = whole[len(first) :]
    if bool(rest.isnan().any()) > bool(first.isnan().any()):
        return False
    is_rounded = low_dtype_of(rest) is not None and low_dtype_of(first) is None
    if is_rounded and not bool((rest == first[-1]).all()):
        return False
    first, whole = (one[_PADDED:] / one.abs().max() for one in (first, whole))
    if not _swings(first):
        return not _swings(whole) or are_sampled_sines(whole)
    return not are_sampled_sines(first) or are_sampled_sines(whole)


def _swings(rows: Tensor) -> bool:
    """Whether a column of some rows both rises and falls, by more than FP32 rounds."""
    steps = rows.diff(dim=0)
    return bool(((steps > EXACT).any(0) & (steps < -EXACT).any(0)).any())
