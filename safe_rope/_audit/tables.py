"""Measure a position table against what its constructor gives on CPU in FP32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from safe_rope._audit.reference import TOLERANCE
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.tensors import in_real_numbers, is_distributed, part_of_rank
from safe_rope._protection.frozen import shard_like
from safe_rope._recognition.numbers import numbers, rounded_numbers
from safe_rope._recognition.reference import Reference
from safe_rope._recognition.tables import is_frequency, may_be_turned
from safe_rope._recognition.truths import frozen_tables

_FEWEST = 4


class Held(NamedTuple):
    """A position table as it is, and as it should be.

    Attributes:
        name: as `safe_rope._recognition.holdings` has it, or a parameter's.
        actual: what the module holds now; None where it holds no tensor.
        expected: what it should hold, on CPU; None where nobody can say.
        finished: whether it is ready for use, such as sines; else frequencies or the like.
        certain: whether whatever differs from ``expected`` is wrong.
        frozen: whether it is a parameter, which a checkpoint may have filled.
        replays: what damages give in its place, where that is known already.
    """

    name: str
    actual: Tensor | None
    expected: Tensor | None
    finished: bool
    certain: bool = True
    frozen: bool = False
    replays: tuple[Tensor, ...] = ()


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
    here = actual.to(wide)
    error = (
        (here - true).abs().nan_to_num(nan=torch.inf).masked_fill(here == true, 0.0)
    )  # infinity less itself
    allowed = TOLERANCE * true.abs().nan_to_num(posinf=0.0)
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


def frozen(module: nn.Module, reference: Reference) -> Iterator[Held]:
    """Yield the frozen parameters that the constructor makes as position tables, those in containers too.

    A parameter has the model's dtype: a finished table may be rounded to it once, a frequency may not.
    """
    for name, parameter, expected in frozen_tables(module, reference):
        shard = getattr(parameter, "ds_tensor", None)  # of this rank, under ZeRO-3
        if shard is not None and shard.numel() < expected.numel() // _ranks():
            continue  # it was moved to somewhere else
        actual = parameter if shard is None else shard.data
        if is_distributed(parameter):
            part = part_of_rank(expected, parameter)
            if part is None:
                continue
            actual, expected = parameter.to_local(), part  # type: ignore[attr-defined]
        ready = not (is_frequency(name) or may_be_turned(module, expected))
        once = ready and actual.dtype in LOW
        true = expected.to(actual.dtype).to(expected.dtype) if once else expected
        true = true if shard is None else shard_like(true, actual)
        yield Held(name, actual, true, ready, certain=False, frozen=True)


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def damaged_in_itself(name: str, table: Tensor, *, is_turned: bool = False) -> str | None:
    """Say what of a table is wrong whatever made it, or None.

    ``is_turned``: its module takes sines of what it holds, whatever its name.

    No position is NaN. Frequencies that rise or fall and are all representable in 16 bits were rounded,
    unless they are whole numbers, powers of two or evenly spaced. Random ones neither rise nor fall.
    """
    values = in_real_numbers(table)
    if not values.is_floating_point():
        return None
    if bool(values.isnan().any()):
        return "it holds what is no number"
    if not values.dim() or not (is_turned or is_frequency(name)) or table.is_complex():
        return None
    whole = _are_whole(values)
    steps = values.double().diff(dim=-1)
    if not (bool((steps >= 0).all()) or bool((steps <= 0).all())):
        return None
    if int((~whole).sum()) < _FEWEST or bool((steps == steps[..., :1]).all()):
        return None
    low = low_dtype_of(values)
    return None if low is None else f"{dtype_name(low)}-rounded frequencies"


def _are_whole(values: Tensor) -> Tensor:
    """Which numbers are whole, or powers of two."""
    return (values == values.round()) | (values.abs().float().frexp().mantissa == 0.5)


def is_rounded(name: str, table: Tensor, other: Tensor) -> bool:
    """Whether 16 bits hold all of a table's frequencies, and not those that other arguments make."""
    if not is_frequency(name) or table.is_complex() or not table.is_floating_point():
        return False
    is_low = low_dtype_of(table) is not None and low_dtype_of(other) is None
    return is_low and not bool(_are_whole(table).all())


def rounded_lists(module: nn.Module, reference: Reference) -> Iterator[Held]:
    """Yield the numbers, and the lists and arrays of numbers, that are rounded, as tables.

    Told by what the constructor makes, or by a frequency's name and the numbers alone.
    """
    for name, meant in rounded_numbers(module, reference):
        now, true = numbers(vars(module)[name]), numbers(meant)
        if now is not None and true is not None:
            yield Held(name, now, true, not is_frequency(name), replays=(now,))
    if reference.module is None:
        for name, value in vars(module).items():
            held = numbers(value) if is_frequency(name) else None
            if held is not None and damaged_in_itself(name, held) is not None:
                yield Held(name, held, None, False)


def is_replayed(actual: Tensor, name: str, reference: Reference) -> bool:
    """Whether a frozen parameter is what its constructor makes under the conditions that damage tables."""
    replays = reference.replayed_parameters(name)
    return any(torch.equal(actual, shard_like(made.to(actual.dtype), actual)) for made in replays)
