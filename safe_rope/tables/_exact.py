"""cos and sin of the exact phase: rows of the levels, combined in float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope._base.dtypes import LOW
from safe_rope._base.positions import refuse_too_large
from safe_rope._base.triton import available, on_device_of, power_of_two
from safe_rope.tables._levels import (
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

_CPU_BLOCK = 1 << 14
"""Entries that are worked on at a time on CPU: the temporaries stay in the cache."""
_DEVICE_BLOCK = 1 << 16
_FEW = 32
"""Positions that are compared with each other before they are looked up."""
_CUT = (1 << 29) - 1  # the significand bits that float64 has beyond FP32
_LONG_RUN = 64
"""Runs of consecutive positions that are this long on average are sliced instead of gathered."""


class _OneFactor(NamedTuple):
    """The factor of one upper digit, as a single position needs it; float64."""

    upper: int
    cos: Tensor  # [half]
    sin: Tensor  # [2, half]: sin and -sin


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
        self._cpu_rows = max(_CPU_BLOCK // self.levels.half, 1)
        self._last_factor: _OneFactor | None = None

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each contiguous ``[*position_ids.shape, half]``, on position_ids' device."""
        if position_ids.is_cpu or _has_float64(position_ids.device.type):
            return self._lookup(position_ids, dtype)
        cos, sin = self._lookup(position_ids.cpu(), dtype)
        return cos.to(position_ids.device), sin.to(position_ids.device)

    def _lookup(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        refuse_too_large(position_ids)
        half = self.levels.half
        count = position_ids.numel()
        if 0 < count <= _FEW and position_ids.is_cpu:
            if count == 1:
                first, others = int(position_ids.item()), []
            else:
                first, *others = position_ids.reshape(-1).to(torch.int64).tolist()
            if not others or set(others) == {first}:  # as the sequences of a batch that is decoded
                rows = self._at(first, dtype).to(dtype, copy=True)
                if others:
                    rows = rows[:, None].repeat(1, count, 1)
                cos, sin = rows.view(2, *position_ids.shape, half).unbind(0)
                return cos, sin
        positions = position_ids.to(torch.int64).reshape(-1)
        cos = originals.empty((count, half), dtype=dtype, device=position_ids.device)
        sin = originals.empty((count, half), dtype=dtype, device=position_ids.device)
        if count and position_ids.device.type == "cpu":
            self._on_cpu(positions, cos, sin)
        elif count and positions.is_cuda and dtype == torch.float32 and available():
            self.store_by_kernel(positions, cos, sin)
        elif count:
            for start, rows in self._on_accelerator(positions):
                stop = start + rows.shape[1]
                _store(cos[start:stop], rows[0])
                _store(sin[start:stop], rows[1])
        shape = (*position_ids.shape, half)
        return cos.view(shape), sin.view(shape)

    def store_by_kernel(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Do what `_on_accelerator` does by one kernel, to the same bits: twenty cost a step of decoding."""
        from safe_rope.tables._triton_kernel import lookup_kernel

        tables = self.levels.on(positions.device)
        with on_device_of(positions):
            lookup_kernel[(positions.numel(),)](
                cos,
                sin,
                positions,
                tables[FINE],
                tables[COARSE],
                tables[TOP],
                self.levels.half,
                HALF=power_of_two(self.levels.half),
                FINE_BITS=FINE_BITS,
                FINE_ROWS=FINE_ROWS,
                COARSE_BITS=COARSE_BITS,
                COARSE_ROWS=COARSE_ROWS,
                TOP_ROWS=TOP_ROWS,
                TABLE_POSITIONS=TABLE_POSITIONS,
                num_warps=1,
                enable_fp_fusion=False,
            )

    def _on_accelerator(self, positions: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, rows ``[2, n, half]``) without looking at a value of positions from the host."""
        tables = self.levels.on(positions.device)
        for start in range(0, positions.numel(), _DEVICE_BLOCK):
            signed = positions[start : start + _DEVICE_BLOCK]
            block = signed.abs()
            invalid = (block < 0) | (block >= TABLE_POSITIONS)  # the smallest int64 is its own magnitude
            upper = block >> FINE_BITS
            coarse, top = _split_upper(upper)
            coarse = torch.where(invalid, 0, coarse)
            top = torch.where(invalid, INVALID_ROW, top)
            factor = combine(tables[TOP].index_select(1, top), tables[COARSE].index_select(1, coarse))
            rows = combine(tables[FINE].index_select(1, block & (FINE_ROWS - 1)), factor)
            rows[1] = torch.where((signed < 0)[:, None], -rows[1], rows[1])
            yield start, rows

    def _at(self, position: int, dtype: torch.dtype) -> Tensor:
        """Return cos and sin of one position, ``[2, half]``, ready to be converted to ``dtype``.

        This is decoding, where the number of calls counts.
        """
        if position < 0:
            _refuse_smallest(position)
            cos, sin = self._at(-position, torch.float64)
            rows = torch.stack((cos, -sin))
            return _round_to_odd(rows) if dtype in LOW else rows
        upper, row = position >> FINE_BITS, position & (FINE_ROWS - 1)
        rows = self.levels.row(FINE, row)
        if not self._fine_is_enough(position):
            factor = self._last_factor
            if factor is None or factor.upper != upper:
                cos, sin = self._one_factor(upper)[:, 0]
                factor = self._last_factor = _OneFactor(upper, cos, torch.stack((sin, -sin)))
            crossed = rows * factor.sin
            rows = rows * factor.cos
            rows += crossed.flip(0)  # cos cos - sin sin, and sin cos + cos sin
        if dtype in LOW:
            rows = _round_to_odd(rows)
        return rows

    def _on_cpu(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        runs = _long_runs(positions)
        block = _Block(min(self._cpu_rows, positions.numel()), self.levels.half)
        if runs is None:
            smallest, largest = (int(bound) for bound in positions.aminmax())
            if smallest < 0:
                self._mirrored(positions, cos, sin)
                return
            self._gathered(positions, largest, block, cos, sin)
        else:
            self._sliced(runs, block, cos, sin)

    def _mirrored(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Store the rows of positions of which some are negative: cos is even, sin is odd."""
        magnitudes = positions.abs()
        _refuse_smallest(int(magnitudes.min()))  # the smallest int64 is its own magnitude
        self._on_cpu(magnitudes, cos, sin)
        sin[positions < 0] *= -1

    def _gathered(self, positions: Tensor, largest: int, work: _Block, cos: Tensor, sin: Tensor) -> None:
        for start in range(0, positions.numel(), self._cpu_rows):
            block = positions[start : start + self._cpu_rows]
            out = slice(start, start + block.numel())
            rows = self.levels.take(FINE, block & (FINE_ROWS - 1), work.buffer(0, block.numel()))
            if self._fine_is_enough(largest):
                _store(cos[out], rows[0])
                _store(sin[out], rows[1])
            else:
                upper, buffer = block >> FINE_BITS, work.buffer(1, block.numel())
                factor = self._factor(upper, largest >> FINE_BITS, buffer)
                work.combine(rows, factor, cos[out], sin[out])

    def _sliced(self, runs: list[tuple[int, int, int]], work: _Block, cos: Tensor, sin: Tensor) -> None:
        for start, first, length in runs:
            done, factor_of, factor = 0, -1, None
            while done < length:
                position = first + done
                upper, row = position >> FINE_BITS, position & (FINE_ROWS - 1)
                rows = self.levels.slice(FINE, row, min(row + self._cpu_rows, row + length - done))
                out = slice(start + done, start + done + rows.shape[1])
                if self._fine_is_enough(position):
                    _store(cos[out], rows[0])
                    _store(sin[out], rows[1])
                else:
                    if factor is None or upper != factor_of:
                        factor, factor_of = self._one_factor(upper), upper
                    work.combine(rows, factor, cos[out], sin[out])
                done += rows.shape[1]

    def _fine_is_enough(self, largest: int) -> bool:
        return largest < FINE_ROWS and self.levels.attention_scaling == 1.0

    def _one_factor(self, upper: int) -> Tensor:
        if upper < COARSE_ROWS:
            return self.levels.slice(COARSE, upper, upper + 1)
        return self._factor(originals.tensor([upper], dtype=torch.int64, device="cpu"), upper)

    def _factor(self, upper: Tensor, largest: int, out: Tensor | None = None) -> Tensor:
        """Return the rows for ``upper``, without the levels that ``largest`` does not reach."""
        take = self.levels.take
        if largest < COARSE_ROWS:
            return take(COARSE, upper, out)
        coarse, top = _split_upper(upper)
        high = take(TOP, top & (TOP_ROWS - 1))
        if largest >= TABLE_POSITIONS >> FINE_BITS:
            high = combine(high, take(BEYOND, top // TOP_ROWS))
        return combine(high, take(COARSE, coarse))


def _refuse_smallest(position: int) -> None:
    if position == -(2**63):
        raise ValueError("position_ids must be above -2**63, got -2**63; mask padding out with position 0")


class _Block:
    """Memory for one block of rows on CPU, used again for the next: fresh pages cost more than the work."""

    def __init__(self, rows: int, half: int) -> None:
        self._shape = (2, rows, half)
        self._buffers: list[Tensor | None] = [None, None, None]

    def buffer(self, which: int, rows: int) -> Tensor:
        """Return float64 ``[2, rows, half]``, one of three, each plane of it contiguous."""
        buffer = self._buffers[which]
        if buffer is None:
            buffer = originals.empty(self._shape, dtype=torch.float64, device="cpu")
            self._buffers[which] = buffer
        return buffer[:, :rows]

    def combine(self, a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Store the rows of the sum of two angles, as `_levels.combine` computes them."""
        first, second = self.buffer(2, a.shape[1])
        a_cos, a_sin = a
        b_cos, b_sin = b
        torch.mul(a_cos, b_cos, out=first)
        torch.mul(a_sin, b_sin, out=second)
        first -= second
        _store(cos, first)
        torch.mul(a_sin, b_cos, out=first)
        torch.mul(a_cos, b_sin, out=second)
        first += second
        _store(sin, first)


def _split_upper(upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coarse and the top digit of ``position >> FINE_BITS``."""
    two_digits = upper < COARSE_ROWS
    coarse = torch.where(two_digits, upper, upper & ((1 << COARSE_BITS) - 1))
    return coarse, torch.where(two_digits, 0, upper >> COARSE_BITS)


def _long_runs(positions: Tensor) -> list[tuple[int, int, int]] | None:
    """Return the runs of consecutive positions as (start, first position, length).

    None where they are short, or one begins below zero.
    """
    count = positions.numel()
    if count < _LONG_RUN:
        return None
    breaks = (positions[1:] - positions[:-1] != 1).nonzero().view(-1)
    if breaks.numel() >= count // _LONG_RUN:
        return None
    starts = [0, *(index + 1 for index in breaks.tolist())]
    runs = []
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        first, last = int(positions[start]), int(positions[stop - 1])
        if first < 0:
            return None
        if last < 0:  # the int64 difference wraps around at 2**63
            raise ValueError(
                f"position_ids must be below 2**63, got a run from {first} past the largest int64"
            )
        runs.append((start, first, stop - start))
    return runs


def _store(target: Tensor, rows: Tensor) -> None:
    if target.dtype in LOW:
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
    probe: Callable[..., Tensor] = originals.empty
    try:
        probe((1,), dtype=torch.float64, device=device_type)
    except (TypeError, RuntimeError):
        return False
    return True
