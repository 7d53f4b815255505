"""Every entry of the exact tables against a correctly rounded reference.

The phase of a position below 2**29 is exact in float64, and torch's float64 cos and sin are within one unit
in the last place of float64, 2**-29 of FP32's. An entry whose float64 value lies farther than 2**-20 of an
FP32 unit from the middle between two FP32 numbers is therefore rounded rightly by float64; the others are
computed with mpmath. Every entry that disagrees is measured with mpmath, too.

The frequencies of rotary_dim 64 are every other one of rotary_dim 128, and a column of a table depends on
nothing but its frequency: where the first is found to hold, the narrow table is compared with the wide one
instead of being computed again.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mpmath
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from laboratory.report import progress_bar
from laboratory.verify_tables import POSITIONS
from safe_rope._base.files import write_atomically
from safe_rope.frequencies import RopeSpec
from safe_rope.tables import RotaryTable

ROOT = Path(__file__).resolve().parents[3]
THETAS = (1e4, 5e5, 1e6)
DIMS = (64, 128)
PIECE = 1 << 16
"""Positions between two records of what is done."""
BLOCK = 1024
"""Rows at a time: the temporaries stay in the CPU's cache."""
STRATUM = 1 << 16
RANDOM_BLOCKS = 16
RANDOM_BLOCK = 4096
LISTED = 200
"""Entries that are not correctly rounded are listed up to so many."""
SOURCES = (
    "tables/__init__",
    "tables/_exact",
    "tables/_levels",
    "tables/_angles",
    "tables/_double_double",
    "_base/positions",
)

Span = tuple[int, int]


@dataclass
class Count:
    """What was found for one rope_theta and rotary_dim."""

    entries: int = 0
    by_mpmath: int = 0
    over_one_ulp: int = 0
    not_correctly_rounded: int = 0
    largest_error_ulp: float = 0.0
    listed: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Count) -> None:
        """Take in what was found elsewhere."""
        self.entries += other.entries
        self.by_mpmath += other.by_mpmath
        self.over_one_ulp += other.over_one_ulp
        self.not_correctly_rounded += other.not_correctly_rounded
        self.largest_error_ulp = max(self.largest_error_ulp, other.largest_error_ulp)
        self.listed = (self.listed + other.listed)[:LISTED]


def _near_the_middle(reference: Tensor) -> Tensor:
    """Whether float64 values lie within 2**-20 of an FP32 unit of the middle between two FP32 numbers."""
    low = reference.view(torch.int64) & ((1 << 29) - 1)
    return low.sub_((1 << 28) - (1 << 9)).bitwise_and_(-(1 << 10)).eq(0)


def check_values(
    positions: Tensor, inv_freq: Tensor, cos: Tensor, sin: Tensor, columns: slice = slice(None)
) -> Count:
    """Compare a block of a table with the truth.

    Args:
        positions: int64 ``[n]``, below 2**29.
        inv_freq: FP32 ``[half]``.
        cos: FP32 ``[n, half]``, what the table has.
        sin: like cos.
        columns: which frequencies to count.

    """
    phase = positions.to(torch.float64)[:, None] * inv_freq[columns].to(torch.float64)
    found = Count(entries=2 * phase.numel())
    step = columns.step or 1
    for name, values, reference in (
        ("cos", cos[:, columns], phase.cos()),
        ("sin", sin[:, columns], phase.sin()),
    ):
        unsure = _near_the_middle(reference)
        doubtful = (values != reference.to(torch.float32)).logical_or_(unsure)
        if not bool(doubtful.any()):
            continue
        found.by_mpmath += int(unsure.sum())
        for row, column in doubtful.nonzero().tolist():
            position, frequency = int(positions[row]), float(inv_freq[columns][column])
            error, nearest = _error(name, position, frequency, float(values[row, column]))
            if nearest:
                continue
            found.not_correctly_rounded += 1
            found.over_one_ulp += error > 1
            found.largest_error_ulp = max(found.largest_error_ulp, error)
            entry = {
                "function": name,
                "position": position,
                "index": column * step,
                "error_ulp": round(error, 4),
            }
            found.listed.append(entry)
    return found


def _error(name: str, position: int, frequency: float, value: float) -> tuple[float, bool]:
    """Return the error of ``value`` in FP32 units at the true value, and whether no FP32 number is nearer."""
    with mpmath.workprec(200):
        phase = mpmath.mpf(position) * mpmath.mpf(frequency)
        true = mpmath.cos(phase) if name == "cos" else mpmath.sin(phase)
        with mpmath.workprec(24):
            nearest = float(+true)
        if value != value or true == 0:
            return (0.0, True) if value == 0 else (float("inf"), False)
        unit = mpmath.ldexp(1, mpmath.frexp(true)[1] - 24)
        return float(abs(mpmath.mpf(value) - true) / unit), value == nearest


class Subject:
    """The tables of one rope_theta, wide and narrow."""

    def __init__(self, theta: float, dims: tuple[int, ...]) -> None:
        self.theta = theta
        self.specs = {dim: RopeSpec("default", theta, dim, dim) for dim in sorted(dims, reverse=True)}
        self.inv_freq = {dim: spec.inv_freq() for dim, spec in self.specs.items()}
        self.tables = {dim: RotaryTable(value) for dim, value in self.inv_freq.items()}
        self.wide, *self.narrow = self.specs
        for dim in self.narrow:
            if not torch.equal(self.inv_freq[dim], self.inv_freq[self.wide][:: self.wide // dim]):
                raise SystemExit(
                    f"error: the frequencies of rotary_dim {dim} are not among those of {self.wide}; "
                    "give one --dim at a time"
                )

        self.digest = self._digest()

    def _digest(self) -> str:
        """Return what the result depends on: the frequencies, and the code that makes the tables."""
        digest = hashlib.sha256()
        for name in SOURCES:
            digest.update((ROOT / "safe_rope" / f"{name}.py").read_bytes())
        for dim, value in self.inv_freq.items():
            digest.update(f"{dim}:{value.tolist()}".encode())
        return digest.hexdigest()[:16]

    def check(self, span: Span) -> dict[int, Count]:
        """Check the positions ``span[0] <= p < span[1]`` of every dim."""
        found = {dim: Count() for dim in self.specs}
        for start in range(*span, BLOCK):
            positions = torch.arange(start, min(start + BLOCK, span[1]))
            inv_freq = self.inv_freq[self.wide]
            cos, sin = self.tables[self.wide].lookup(positions)
            result = check_values(positions, inv_freq, cos, sin)
            found[self.wide].add(result)
            for dim in self.narrow:
                step = self.wide // dim
                few = self.tables[dim].lookup(positions)
                if not (torch.equal(few[0], cos[:, ::step]) and torch.equal(few[1], sin[:, ::step])):
                    found[dim].add(check_values(positions, self.inv_freq[dim], *few))
                    continue
                found[dim].add(_every(result, step, entries=2 * few[0].numel()))
        return found


def _every(found: Count, step: int, entries: int) -> Count:
    """Return what of ``found`` belongs to every ``step``-th frequency."""
    listed = [
        {**entry, "index": entry["index"] // step} for entry in found.listed if entry["index"] % step == 0
    ]
    errors = [entry["error_ulp"] for entry in listed]
    return Count(
        entries=entries,
        over_one_ulp=sum(error > 1 for error in errors),
        not_correctly_rounded=len(listed),
        largest_error_ulp=max(errors, default=0.0),
        listed=listed,
    )


class Record:
    """What is done already, in a file, so that an interrupted check goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._done: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._done = json.loads(path.read_text())

    def get(self, key: str) -> dict[int, Count] | None:
        """Return what was found for a piece, None if it is not done."""
        found = self._done.get(key)
        return None if found is None else {int(dim): Count(**count) for dim, count in found.items()}

    def put(self, key: str, found: dict[int, Count]) -> None:
        """Keep what was found for a piece."""
        self._done[key] = {str(dim): asdict(count) for dim, count in found.items()}
        if self._path is not None:
            write_atomically(str(self._path), json.dumps(self._done).encode())


def pieces(first: int, last: int) -> list[Span]:
    """Split ``first <= p < last`` at the multiples of PIECE."""
    starts = [first, *range((first // PIECE + 1) * PIECE, last, PIECE)]
    return list(zip(starts, [*starts[1:], last], strict=True))


def stratum(seed: int) -> list[Span]:
    """Return all positions below 65,536 and random blocks of the rest."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(STRATUM, POSITIONS - RANDOM_BLOCK, (RANDOM_BLOCKS,), generator=generator).tolist()
    return [(0, STRATUM), *((start, start + RANDOM_BLOCK) for start in sorted(starts))]


def verify(
    thetas: tuple[float, ...],
    dims: tuple[int, ...],
    spans: list[Span],
    record: Record,
    *,
    stop_at: float = float("inf"),
    shown: bool = False,
) -> tuple[dict[tuple[float, int], Count], bool]:
    """Check spans for every theta and dim; return what was found, and whether all of it is done."""
    total: dict[tuple[float, int], Count] = {(theta, dim): Count() for theta in thetas for dim in dims}
    complete = True
    total_positions = len(thetas) * sum(stop - start for start, stop in spans)
    with progress_bar(total_positions, shown=shown) as advance:
        for theta in thetas:
            subject = Subject(theta, dims)
            for span in spans:
                key = f"{theta:g}/{'+'.join(map(str, sorted(dims)))}/{span[0]}-{span[1]}/{subject.digest}"
                found = record.get(key)
                if found is None:
                    if time.monotonic() > stop_at:
                        complete = False
                        continue
                    found = subject.check(span)
                    record.put(key, found)
                for dim, count in found.items():
                    total[theta, dim].add(count)
                advance(span[1] - span[0], f"rope_theta {theta:g}")
    return total, complete


def show(total: dict[tuple[float, int], Count]) -> None:
    """Print one line per rope_theta and rotary_dim."""
    names = ("rope_theta", "rotary_dim", "entries", "over 1 ulp", "not correctly rounded")
    table = Table(*names, "largest error (ulp)", "settled by mpmath")
    for (theta, dim), count in total.items():
        largest = f"{count.largest_error_ulp:.4f}" if count.not_correctly_rounded else "0.5"
        table.add_row(
            f"{theta:g}",
            str(dim),
            f"{count.entries:,}",
            str(count.over_one_ulp),
            str(count.not_correctly_rounded),
            largest,
            f"{count.by_mpmath:,}" if count.by_mpmath else "with the wider",
        )
    Console(width=120).print(table)
