"""What the numbers of a table say where no constructor does: rounded ones, and sines of rounded ones."""

from __future__ import annotations

import torch
from torch import Tensor

from safe_rope._audit.tables import damaged_in_itself
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.tensors import in_real_numbers
from safe_rope._recognition.tables import is_no_position
from safe_rope._recognition.truths import ROUNDED
from safe_rope._recognition.waves import oscillates, rest_from_sines, rises_or_falls

_FEWEST, _ENOUGH = 8, 4096
"""Rows of a table that are looked at, and columns at most."""
_COUNTED = 256
"""Positions that every 16-bit dtype counts."""
_FEW = 4
"""Frequencies that no chance makes those of a 16-bit dtype."""
_OFF = 2.0**-21
"""Relative: what a frequency may be off by that comes from a sine in FP32."""
_SHORT, _SWING = 12, 1e-2
"""Rows of which 16 bits hold the phases nearly, and the deviation of a column that changes."""


def wrong_in(name: str, table: Tensor, *, may_be_turned: bool) -> str | None:
    """Say what a table's numbers show, or None.

    ``may_be_turned``: the code that gets at it counts, or takes sines.
    """
    values = in_real_numbers(table.detach()).squeeze()
    if values.dim() == 1:
        if len(values) > _ENOUGH or is_no_position(name) or not rises_or_falls(values):
            return None
        said = damaged_in_itself(name, values.cpu(), is_turned=may_be_turned)
        return said if len(_telling(values)) >= _FEW else None
    while values.dim() > 2 + table.is_complex():
        values = values[0]
    rows = values[:_ENOUGH, :_ENOUGH].cpu().float()
    rows = rows.flatten(1)
    if len(rows) < _FEWEST or not _begins_as_sines(rows):
        return None
    is_whole = torch.equal(rows, rows.round())  # no dtype rounds it
    if not is_whole and (low := low_dtype_of(rows)) is not None:
        return f"{dtype_name(low)}-rounded sines or cosines of positions" if _waves(rows) else None
    first = rows[:_COUNTED]
    if not oscillates(first):
        return None
    if (low := _rounded_frequencies(first)) is not None:
        return f"sines of {dtype_name(low)}-rounded frequencies"
    low = _rounded_positions(rows)
    return None if low is None else f"sines of {dtype_name(low)}-rounded positions"


def _begins_as_sines(rows: Tensor) -> bool:
    """Whether the first row is that of position 0, and no number is larger than its cosines."""
    largest = rows[0].max()
    begins = ((rows[0] == 0) | (rows[0] == largest)).all() if bool(rows[0].any()) else (rows[0] == 0).all()
    bound = largest if bool(rows[0].any()) else rows.new_tensor(1.0)
    return bool(begins & (bound > 0) & (rows.abs() <= bound * 1.01).all() & (rows < 0).any())


def _waves(rows: Tensor) -> bool:
    """Whether most columns that change are sampled sines, as far as 16 bits hold them and their phases."""
    first = rows[:_SHORT].double() / rows[:_SHORT].abs().max()
    swings = first.std(0) > _SWING
    is_sine = rest_from_sines(first) < 2 * ROUNDED
    return bool((swings & is_sine).sum() * 2 > swings.sum())


def _telling(values: Tensor) -> set[float]:
    """Return the numbers of more than five bits: shorter ones are written as often as rounded."""
    bits = values.double().frexp().mantissa * 32
    return set(values[bits != bits.round()].tolist())


def _rounded_frequencies(rows: Tensor) -> torch.dtype | None:
    """Return the dtype that has every frequency whose sines stand in the columns; None where none has."""
    amplitude = float(rows[0].max()) or 1.0
    sines = (rows[1, rows[0] == 0].double() / amplitude).abs().clamp(max=1.0).asin()
    sines = sines[(sines > 0) & (sines < 1.0)]
    for low in LOW:
        near = sines.to(low).double()
        steps = torch.tensor(sorted(set(near.tolist())), dtype=torch.float64).diff()
        is_even = bool((steps == steps[:1]).all())
        if not is_even and len(_telling(near)) >= _FEW and bool(((near - sines).abs() <= _OFF * sines).all()):
            return low
    return None


def _rounded_positions(rows: Tensor) -> torch.dtype | None:
    """Return the dtype to which the positions were rounded that have the same rows; None where none was."""
    counted = torch.arange(len(rows))
    if len(rows) <= _COUNTED or torch.equal(rows[_COUNTED], rows[-1]):
        return None
    for low in LOW:
        nearest = counted.to(low).long()
        known = nearest < len(rows)
        if not torch.equal(nearest, counted) and torch.equal(rows[known], rows[nearest[known]]):
            return low
    return None
