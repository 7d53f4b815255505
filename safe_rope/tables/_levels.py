"""The levels of an exact table: cos and sin of ``row * 2**shift * inv_freq`` for the rows of one digit.

A position is written with three digits, ``top``, ``coarse`` and ``fine``, and its phasor is the product of
three rows. Every entry is a correctly rounded float64, made from integer and IEEE arithmetic on CPU. Tables
therefore have the same bits on every machine, and a row does not depend on which other rows were built.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._base import originals
from safe_rope._base.devices import kept_on
from safe_rope.tables import _double_double as dd
from safe_rope.tables._angles import doubled_angles

FINE_BITS = 12
FINE_ROWS = 1 << FINE_BITS
COARSE_BITS = 11
COARSE_ROWS = 2448
"""More than the digit needs: two factors then reach 10,027,008 positions, within 7 MB at rotary_dim 128."""
TOP_SHIFT = FINE_BITS + COARSE_BITS
TOP_ROWS = 256
TABLE_POSITIONS = TOP_ROWS << TOP_SHIFT
"""2**31; beyond it the tables have no row, and the phasor of the upper bits is computed when asked for."""
INVALID_ROW = TOP_ROWS
"""The row of NaN after the last one of the top level: what an accelerator gives that it cannot refuse."""

_POSITION_BITS = 63
_BUILD_ROWS = 256


class _Digit(NamedTuple):
    """Which bits of a position a level stands for, and how many rows it has."""

    shift: int
    rows: int
    carries_scaling: bool = False


FINE = _Digit(0, FINE_ROWS)
COARSE = _Digit(FINE_BITS, COARSE_ROWS, carries_scaling=True)
TOP = _Digit(TOP_SHIFT, TOP_ROWS)
BEYOND = _Digit(TOP_SHIFT + 8, 0)
"""The bits above the top level; it has no table."""

_FEW_ROWS = 32
_FREE_LOOKUPS = 4
"""So many small lookups compute their rows instead of building a level.

Dynamic NTK has a new inv_freq for every token that it decodes, and looks one position up in each.
"""


class Levels:
    """The levels of one inv_freq and attention_scaling, on every device that asked for them.

    A level is a float64 tensor ``[2, rows, half]``, cos before sin, ``half = rotary_dim // 2``: whole planes
    are what elementwise kernels are fastest on. The coarse level carries the attention_scaling. Thread-safe;
    the tensors are never inference tensors.
    """

    def __init__(self, inv_freq: tuple[float, ...], attention_scaling: float) -> None:
        self.half = len(inv_freq)
        self.attention_scaling = attention_scaling
        self._inv_freq = inv_freq
        self._lock = threading.RLock()
        self._bases: dd.Phasor | None = None
        self._cpu: dict[_Digit, Tensor] = {}
        self._on_device: dict[torch.device, dict[_Digit, Tensor]] = {}
        self._free_lookups = {FINE: _FREE_LOOKUPS, COARSE: _FREE_LOOKUPS, TOP: _FREE_LOOKUPS}

    def level(self, digit: _Digit) -> Tensor:
        """Return a level on CPU, built at the first call; TOP has a last row of NaN (INVALID_ROW)."""
        level = self._cpu.get(digit)
        if level is None:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                level = self._cpu.get(digit)
                if level is None:
                    level = self._cpu[digit] = self._build(digit)
        return level

    def take(self, digit: _Digit, index: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows ``index`` (int64 ``[n]`` on CPU) of a level: float64 ``[2, n, half]``."""
        if digit is BEYOND:
            return self.rows(digit, index)
        if digit not in self._cpu and index.numel() <= _FEW_ROWS and self._free_lookups[digit] > 0:
            self._free_lookups[digit] -= 1
            return self.rows(digit, index)
        level = self.level(digit)
        if out is None:
            out = originals.empty((2, index.numel(), self.half), dtype=torch.float64, device="cpu")
        torch.index_select(level[0], 0, index, out=out[0])
        torch.index_select(level[1], 0, index, out=out[1])
        return out

    def row(self, digit: _Digit, index: int) -> Tensor:
        """Return one row of a level on CPU, ``[2, half]``."""
        level = self._cpu.get(digit)
        return self.slice(digit, index, index + 1)[:, 0] if level is None else level.select(1, index)

    def slice(self, digit: _Digit, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of a level on CPU, ``[2, n, half]``; they end where it ends."""
        level = self._cpu.get(digit)
        if level is None:
            if stop - start == 1:
                return self.take(digit, originals.tensor([start], dtype=torch.int64, device="cpu"))
            level = self.level(digit)
        return level[:, start : min(stop, digit.rows)]

    def on(self, device: torch.device) -> dict[_Digit, Tensor]:
        """Return copies of the three levels on ``device``, made once per device."""
        levels = self._on_device.get(device)
        if levels is None:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                levels = self._on_device.get(device)
                if levels is None:
                    digits = (FINE, COARSE, TOP)
                    copies = kept_on(device, [self.level(digit) for digit in digits])
                    levels = dict(zip(digits, copies, strict=True))
                    self._on_device[device] = levels
        return levels

    def rows(self, digit: _Digit, index: Tensor) -> Tensor:
        """Compute rows of a level without building it.

        Args:
            digit: the level.
            index: int64 ``[n]`` on CPU, ``0 <= index < 2**(63 - digit.shift)``.

        Returns:
            float64 ``[2, n, half]``, the bits that the level's rows have.
        """
        result = self._unit(index.numel())
        for bit in range(int(index.max()).bit_length() if index.numel() else 0):
            chosen = ((index >> bit) & 1).bool()[:, None]
            rotated = dd.rotate(result, self._base(digit.shift + bit))
            result = torch.where(chosen, rotated, result)
        return self._rounded(digit, result)

    def _build(self, digit: _Digit) -> Tensor:
        """Double the rows until there are enough: row ``2**k + i`` is row ``i`` turned by base k."""
        rows = digit.rows
        phasor = originals.empty((4, rows, self.half), dtype=torch.float64, device="cpu")
        phasor[:, :1] = self._unit(1)
        for bit in range((rows - 1).bit_length()):
            base, done = self._base(digit.shift + bit), 1 << bit
            for start in range(0, min(done, rows - done), _BUILD_ROWS):  # blocks that stay in the CPU's cache
                stop = min(start + _BUILD_ROWS, done, rows - done)
                phasor[:, done + start : done + stop] = dd.rotate(phasor[:, start:stop], base)
        level = self._rounded(digit, phasor)
        if digit is TOP:
            invalid = torch.full_like(level[:, :1], torch.nan)
            level = torch.cat((level, invalid), dim=1)
        return level

    def _rounded(self, digit: _Digit, phasor: dd.Phasor) -> Tensor:
        # The low words end here; a correctly rounded lookup would need them kept beside the high ones.
        if digit.carries_scaling and self.attention_scaling != 1.0:
            factor = originals.tensor(self.attention_scaling, dtype=torch.float64, device="cpu")
            phasor = dd.scale(phasor, factor)
        return torch.stack((phasor[0], phasor[2]))

    def _unit(self, rows: int) -> dd.Phasor:
        """Return the phasor of no angle, for so many rows."""
        phasor = originals.empty((4, rows, self.half), dtype=torch.float64, device="cpu")
        phasor[0], phasor[1:] = 1.0, 0.0
        return phasor

    def _base(self, bit: int) -> dd.Phasor:
        """Return the phasor of ``2**bit * inv_freq``, ``[half]``."""
        if self._bases is None:
            with self._lock:
                if self._bases is None:
                    self._bases = _bases(self._inv_freq)
        return self._bases[:, bit]


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return the rows of the sum of two angles, each operation rounded to float64.

    Args:
        a: float64 ``[2, n, half]``.
        b: float64 ``[2, n, half]`` or ``[2, 1, half]``.
    Source: the addition theorems of cos and sin.
    """
    result = a * b[0]
    crossed = a * b[1]
    result[0] -= crossed[1]
    result[1] += crossed[0]
    return result


def _bases(inv_freq: tuple[float, ...]) -> dd.Phasor:
    """Return the phasors of ``2**bit * inv_freq``, ``[4, 63, half]``."""
    columns = [doubled_angles(value, _POSITION_BITS) for value in inv_freq]
    words = [
        column[bit][part][word]
        for part in (0, 1)
        for word in (0, 1)
        for bit in range(_POSITION_BITS)
        for column in columns
    ]
    with torch.inference_mode(False):
        return originals.vector(words, torch.float64).view(4, _POSITION_BITS, len(columns))
