"""cos and sin of the exact phase: rows of the levels, combined in float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from . import _originals
from ._levels import (
    BEYOND,
    COARSE,
    COARSE_BITS,
    COARSE_ROWS,
    FINE,
    FINE_BITS,
    FINE_ROWS,
    INVALID_ROW,
    TABLE_POSITIONS,
    TOP,
    TOP_ROWS,
    Levels,
    combine,
)
from ._positions import refuse_negative

_CPU_BLOCK = 256
"""Rows that are worked on at a time on CPU: the temporaries stay in the cache."""
_DEVICE_BLOCK = 1 << 16
_CUT = (1 << 29) - 1  # the significand bits that float64 has beyond FP32
_LONG_RUN = 64
"""Runs of consecutive positions that are this long on average are sliced instead of gathered."""


class ExactLookup:
    """The arithmetic behind RotaryTable. Thread-safe."""

    def __init__(
        self, inv_freq: tuple[float, ...], attention_scaling: float, position_divisor: float
    ) -> None:
        if position_divisor != 1.0:
            raise ValueError(
                f"an exact table needs position_divisor 1.0, got {position_divisor}; "
                "divide inv_freq by it instead"
            )
        self.levels = Levels(inv_freq, attention_scaling)

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each contiguous ``[*position_ids.shape, half]``, on position_ids' device."""
        device = position_ids.device
        if device.type != "cpu" and not _has_float64(device.type):
            cos, sin = self(position_ids.cpu(), dtype)
            return cos.to(device), sin.to(device)
        positions = position_ids.to(torch.int64).reshape(-1)
        shape = (positions.numel(), self.levels.half)
        cos = _originals.empty(shape, dtype=dtype, device=device)
        sin = _originals.empty(shape, dtype=dtype, device=device)
        if positions.numel():
            blocks = self._on_cpu(positions) if device.type == "cpu" else self._on_accelerator(positions)
            for start, rows in blocks:
                stop = start + rows.shape[0]
                _store(cos[start:stop], rows[:, 0])
                _store(sin[start:stop], rows[:, 1])
        shape = (*position_ids.shape, self.levels.half)
        return cos.view(shape), sin.view(shape)

    def _on_accelerator(self, positions: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, rows) without looking at a value of positions from the host."""
        tables = self.levels.on(positions.device)
        for start in range(0, positions.numel(), _DEVICE_BLOCK):
            block = positions[start : start + _DEVICE_BLOCK]
            invalid = (block < 0) | (block >= TABLE_POSITIONS)
            upper = block >> FINE_BITS
            coarse, top = _split_upper(upper)
            coarse = torch.where(invalid, 0, coarse)
            top = torch.where(invalid, INVALID_ROW, top)
            factor = combine(tables[TOP].index_select(0, top), tables[COARSE].index_select(0, coarse))
            yield start, combine(tables[FINE].index_select(0, block & (FINE_ROWS - 1)), factor)

    def _on_cpu(self, positions: Tensor) -> Iterator[tuple[int, Tensor]]:
        runs = _long_runs(positions)
        if runs is None:
            smallest, largest = (int(bound) for bound in positions.aminmax())
            refuse_negative(smallest)
            return self._gathered(positions, largest)
        return self._sliced(runs)

    def _gathered(self, positions: Tensor, largest: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, positions.numel(), _CPU_BLOCK):
            block = positions[start : start + _CPU_BLOCK]
            rows = self.levels.take(FINE, block & (FINE_ROWS - 1))
            if not self._fine_is_enough(largest):
                rows = combine(rows, self._factor(block >> FINE_BITS, largest >> FINE_BITS))
            yield start, rows

    def _sliced(self, runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, Tensor]]:
        for start, first, length in runs:
            done, factor_of = 0, -1
            while done < length:
                position = first + done
                upper, row = position >> FINE_BITS, position & (FINE_ROWS - 1)
                rows = self.levels.slice(FINE, row, min(row + _CPU_BLOCK, row + length - done))
                if not self._fine_is_enough(position):
                    if upper != factor_of:
                        factor, factor_of = self._one_factor(upper), upper
                    rows = combine(rows, factor)
                yield start + done, rows
                done += rows.shape[0]

    def _fine_is_enough(self, largest: int) -> bool:
        return largest < FINE_ROWS and self.levels.attention_scaling == 1.0

    def _one_factor(self, upper: int) -> Tensor:
        if upper < COARSE_ROWS:
            return self.levels.slice(COARSE, upper, upper + 1)
        return self._factor(_originals.tensor([upper], dtype=torch.int64, device="cpu"), upper)

    def _factor(self, upper: Tensor, largest: int) -> Tensor:
        """Return the rows for ``upper``, without the levels that ``largest`` does not reach."""
        take = self.levels.take
        if largest < COARSE_ROWS:
            return take(COARSE, upper)
        coarse, top = _split_upper(upper)
        high = take(TOP, top & (TOP_ROWS - 1))
        if largest >= TABLE_POSITIONS >> FINE_BITS:
            high = combine(high, take(BEYOND, top // TOP_ROWS))
        return combine(high, take(COARSE, coarse))


def _split_upper(upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coarse and the top digit of ``position >> FINE_BITS``."""
    two_digits = upper < COARSE_ROWS
    coarse = torch.where(two_digits, upper, upper & ((1 << COARSE_BITS) - 1))
    return coarse, torch.where(two_digits, 0, upper >> COARSE_BITS)


def _long_runs(positions: Tensor) -> list[tuple[int, int, int]] | None:
    """Return the runs of consecutive positions as (start, first position, length); None if they are short."""
    count = positions.numel()
    if count == 1:  # decoding
        first = int(positions)
        refuse_negative(first)
        return [(0, first, 1)]
    if count < _LONG_RUN:
        return None
    breaks = (positions[1:] - positions[:-1] != 1).nonzero().view(-1)
    if breaks.numel() >= count // _LONG_RUN:
        return None
    starts = [0, *(index + 1 for index in breaks.tolist())]
    runs = []
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        first = int(positions[start])
        refuse_negative(first)
        refuse_negative(int(positions[stop - 1]))  # the int64 difference wraps around at 2**63
        runs.append((start, first, stop - start))
    return runs


def _store(target: Tensor, rows: Tensor) -> None:
    if target.dtype in (torch.bfloat16, torch.float16):
        rows = _round_to_odd(rows)
    target.copy_(rows)


def _round_to_odd(x: Tensor) -> Tensor:
    """Return float64 ``x`` with a 24-bit significand whose last bit says that something was cut off.

    Torch converts float64 to a 16-bit type by way of FP32, which rounds twice; from here on it rounds once.
    Source: Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums", theorem 3.
    """
    bits = x.contiguous().view(torch.int64)
    odd = bits & _CUT
    odd += _CUT  # carries into the last kept bit if anything is cut
    odd |= bits
    odd &= ~_CUT
    return odd.view(torch.float64).to(torch.float32)


@cache
def _has_float64(device_type: str) -> bool:
    """Whether a kind of device computes in float64 (mps does not)."""
    probe: Callable[..., Tensor] = _originals.empty
    try:
        probe((1,), dtype=torch.float64, device=device_type)
    except (TypeError, RuntimeError):
        return False
    return True
