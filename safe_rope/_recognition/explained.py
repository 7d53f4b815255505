"""Whether the values of a table are explained by what its constructor gives and what happened to them since.

A table is replaced only if its values are explained. They are the constructor's to the bit, or those after
the casts that happened. Or the same constructor gives them under the conditions that it ran in. Any other
values are somebody's intent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch

from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import in_real_numbers

Verdict = Literal["constructor", "built", "kept", "unfilled", "unknown"]

UNTOLD = "its constructor cannot be run again, as its arguments are not known"
UNMADE = "its constructor does not make it, and nobody knows what has"
DRAWN = "its constructor draws it, and nothing has filled it since it stood on meta"
LOST = "it was written to while it stood on meta, and nobody can say what it is to hold"
CHANGED = "it holds values that its constructor does not give"
UNKNOWN = (UNTOLD, UNMADE, CHANGED)
"""Why nobody can say whether values are right."""
MADE_LOW = "its forward has made it anew in 16 bits, and it is as rounded as in the stock model"
LOW_PHASES = "its phases were rounded before cos and sin, as in the stock model"
NOT_COMPARED = "not compared with FP32"
COMPUTED_LOW = "computed in low precision"
IMPORTED_LOW = "its file was imported inside of zero.Init, whose constructors it has kept and forward calls"
AS_STOCK = (MADE_LOW, LOW_PHASES, NOT_COMPARED, COMPUTED_LOW, IMPORTED_LOW)
"""What a forward has shown of positions: they are no better than in the stock model."""
_MANY = 1024
"""Values of which some are compared before all of them are."""
_LEAST = 1e-37
"""No table holds a smaller number but zero, unless it decays from a larger one."""
_FAINT = 1e-6
"""What the largest number of a table is above."""
_NEAR = 2.0**-7
"""Relative: how far a few roundings to 16 bits move a value."""


class Truth(NamedTuple):
    """What a table should hold, and where that is known from.

    ``verdict``: "constructor": what the constructor gives with nothing intercepted; "built": what it made, as
    nothing was in the way; "kept": what stands there, though nothing explains it; "unfilled" and "unknown":
    nothing can be said, ``reason`` says why.
    """

    values: torch.Tensor | None
    verdict: Verdict
    reason: str = ""

    @property
    def is_named(self) -> bool:
        """Whether the report has to name the table."""
        return self.verdict in ("kept", "unfilled", "unknown")


def is_same(current: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every value, NaN included."""
    return current.shape == known.shape and current.dtype == known.dtype and _equal(current, known)


def is_cast(current: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether ``current`` is what casts alone, one or two of them, make of ``known``."""
    if not current.is_floating_point() and not current.is_complex():
        return is_same(current, known)
    if current.shape != known.shape:
        return False
    if current.numel() > _MANY and not is_cast(_some(current), _some(known)):
        return False
    if known.is_complex() and current.is_complex():
        there = not bool(current.imag.any()) or is_cast(current.imag, known.imag)
        return is_cast(current.real, known.real) and there
    if known.is_complex():
        known = known.real  # a cast to a real dtype leaves the imaginary part behind
    for dtypes in ((), *itertools.permutations(LOW, 1), *itertools.permutations(LOW, 2)):
        through = known
        for dtype in dtypes:
            if not through.is_complex():
                through = through.to(dtype)
        if _equal(current, through.to(current.dtype)):
            return True
    return False


def is_blank(current: torch.Tensor) -> bool:
    """Whether a tensor is empty, one number throughout, or holds what is no number."""
    values = current.reshape(-1)
    return not len(values) or bool(values.isnan().any()) or bool((values == values[0]).all())


def is_unfilled(current: torch.Tensor, true: torch.Tensor) -> bool:
    """Whether ``current`` looks like memory that nobody has written to, where ``true`` does not."""
    if current.shape != true.shape or current.is_complex() != true.is_complex() or not current.numel():
        return False
    values, known = in_real_numbers(current), in_real_numbers(true)
    if bool((known.isfinite() & ~values.isfinite()).any()):
        return True
    if values.numel() > 1 and bool((known == known.reshape(-1)[0]).all()):
        return False
    if bool((values == values.reshape(-1)[0]).all()) and (values.numel() > 1 or not values.any()):
        return True
    finite = known.isfinite()
    if not bool(finite.all()):
        values, known = values[finite], known[finite]
    if not values.numel():
        return False
    least, largest = _sizes(values)
    least_known, largest_known = _sizes(known)
    if least_known < _LEAST and largest_known < _FAINT:
        return False  # what is known is such memory itself
    return least < min(_LEAST, least_known / 2) or largest > 1e6 * (largest_known or 1.0)  # 0 has no size


def _sizes(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest number but zero, without its sign, and the largest."""
    sizes = (values if values.is_floating_point() else values.double()).abs()
    return float(sizes.where(sizes > 0, math.inf).min()), float(sizes.max())


def is_damage(current: torch.Tensor, known: torch.Tensor, *, is_written: bool = False) -> bool:
    """Whether later values are explained: by casts, by being made again in 16 bits, or as never filled.

    ``is_written``: somebody has written to it; one number is then meant, be it zero or the next of a count.
    """
    if is_cast(current, known):
        return True
    if is_written and current.numel() == 1 and bool(current.isfinite().all()):
        return False
    if is_unfilled(current, known):
        return True
    if current.shape != known.shape or known.is_complex() or not current.is_floating_point():
        return False
    if not any(_equal(current, current.to(low).to(current.dtype)) for low in LOW):
        return False
    wide, true = current.double(), known.double()
    return bool(((wide == true) | ((wide - true).abs() <= _NEAR * true.abs())).all())


def find_truth(
    current: torch.Tensor | None,
    rebuilt: torch.Tensor | None,
    *,
    plain: bool,
    certain: bool,
    runs: bool,
    replays: Callable[[], Iterable[torch.Tensor | None]],
) -> Truth:
    """Say what a table should hold.

    Args:
        current: what it holds: on CPU, or on meta.
        rebuilt: what its constructor gives with nothing intercepted, FP32 on CPU; None where it cannot run
            again, or does not make it.
        plain: whether nothing was in the way when it was built.
        certain: whether it is certain what the constructor was called with.
        runs: whether its constructor can run again, whatever it makes.
        replays: what the constructor gives under each of the conditions that it may have run in.

    """
    maker = "does not make it" if runs else "cannot be run again"
    if current is None or current.is_meta:
        if rebuilt is None:
            return Truth(None, "unfilled", f"its constructor {maker}, and nothing has filled it")
        if not certain:
            return Truth(None, "unfilled", "its constructor changes its arguments, and nothing has filled it")
        return Truth(rebuilt, "constructor")
    if rebuilt is not None and is_same(current, rebuilt):
        return Truth(rebuilt, "constructor")
    if rebuilt is not None and current.shape == rebuilt.shape:
        if is_cast(current, rebuilt):
            return Truth(rebuilt, "constructor")
        for replay in () if plain else replays():
            if replay is not None and is_cast(current, replay):
                return Truth(rebuilt, "constructor")
        if not plain and is_unfilled(current, rebuilt):
            if certain:
                return Truth(rebuilt, "constructor")
            return Truth(
                None, "unfilled", "nothing has filled it, and it is not certain what it was built with"
            )
    if rebuilt is None and current.isnan().any():
        return Truth(None, "unfilled", f"it holds no numbers, and its constructor {maker}")
    if plain and (rebuilt is None or current.dtype not in LOW):
        return Truth(current, "built")
    if rebuilt is None:
        return Truth(current, "kept", UNMADE if runs else UNTOLD)
    return Truth(current, "kept", CHANGED)


def _some(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1)[:: -(-values.numel() // _MANY)]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype == other.dtype and torch.equal(one, other):
        return True
    if one.dtype.is_floating_point or one.dtype.is_complex:
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return torch.equal(one, other)
