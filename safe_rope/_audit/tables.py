"""Measure a position table against what its constructor gives on CPU in FP32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._audit.reference import TOLERANCE


class Held(NamedTuple):
    """A position table as it is, and as it should be.

    Attributes:
        name: as `safe_rope._recognition.holdings` has it, or a parameter's.
        actual: what the module holds now; None where it holds no tensor.
        expected: what it should hold, on CPU; None where nobody can say.
        finished: whether it is ready for use, such as sines; else frequencies or the like.
        certain: whether whatever differs from ``expected`` is wrong.
    """

    name: str
    actual: Tensor | None
    expected: Tensor | None
    finished: bool
    certain: bool = True


class Difference(NamedTuple):
    """How far a table is off.

    Attributes:
        absolute: the largest error of a value.
        row: the first row (of the last dimension but one) beyond the tolerance; None where there are none.
        damaged: whether a value is beyond the tolerance.
    """

    absolute: float
    row: int | None
    damaged: bool


def aligned(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the rows that both have, on CPU: a table can have grown; None where the shapes do not fit."""
    if actual.dim() != expected.dim():
        return None
    common = tuple(slice(min(a, b)) for a, b in zip(actual.shape, expected.shape, strict=True))
    grown = [a != b for a, b in zip(actual.shape, expected.shape, strict=True)]
    if any(grown) and (sum(grown) > 1 or grown[-1] or not all(s.stop for s in common)):
        return None
    return actual[common].detach().cpu(), expected[common]


def difference(actual: Tensor, expected: Tensor, *, finished: bool, slack: bool) -> Difference:
    """Measure ``actual`` against ``expected``, both on CPU and of one shape.

    Args:
        actual: a table.
        expected: what it should hold.
        finished: whether sines and the like were taken already.
        slack: whether each may come from phases of its own, rounded in FP32, that grow with the row.

    """
    wide = torch.complex128 if expected.is_complex() else torch.float64
    true = expected.to(wide)
    error = (actual.to(wide) - true).abs().nan_to_num(nan=torch.inf)
    allowed = TOLERANCE * true.abs()
    if finished or not bool(true.any()):
        allowed = allowed.clamp(min=TOLERANCE)
    if slack and finished and true.dim() > 1:
        rows = torch.arange(true.shape[-2], dtype=torch.float64)
        allowed = torch.maximum(allowed, TOLERANCE * rows[:, None])
    if not (expected.is_floating_point() or expected.is_complex()):
        allowed = torch.zeros_like(error)
    beyond = error > allowed
    row = None
    if true.dim() > 1 and bool(beyond.any()):
        row = int(beyond.reshape(-1, *beyond.shape[-2:]).any(0).any(-1).nonzero()[0])
    return Difference(float(error.max()) if error.numel() else 0.0, row, bool(beyond.any()))
