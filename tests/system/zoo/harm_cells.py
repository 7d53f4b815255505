"""What safe_rope does to a style under a load path: one cell of the table, from measurements alone.

Truth is the style as plain torch builds it in FP32 on CPU, with no safe_rope, and, where a formula exists,
that formula in float64.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harm_paths import CAST, PATHS, PLAIN, THROUGH_DATA, ZERO_INIT, LoadPath
from harm_runs import How, Library, Run, run
from styles import LENGTHS, STYLES, Style

import safe_rope

RIGHT, REPAIRED, NAMED, BOTH_CRASH = "right", "repaired", "named", "both crash"
SILENTLY_WRONG = "silently wrong"
MADE_WRONG = "right without, wrong with"
BROKEN = "broken only by the guard"
OTHER_DTYPES = "other dtypes"
GOOD = (RIGHT, REPAIRED, NAMED, BOTH_CRASH)
BAD = (SILENTLY_WRONG, MADE_WRONG, BROKEN, OTHER_DTYPES)

LOW = (torch.bfloat16, torch.float16)
PHASE = 2.0**-23 * max(LENGTHS)
"""What FP32 may be off by where a phase of ``max(LENGTHS)`` radians is rounded."""


@dataclass(frozen=True)
class Cell:
    """One style under one load path with one way of protecting it: what became of it, and why."""

    style: str
    path: str
    how: str
    tables: str
    kind: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.style}, {self.path}, {self.how} ({self.tables}): {self.kind}: {self.reason}"


COLLECTED: list[Cell] = []
"""Every cell that this process has looked at."""


def ways(path: LoadPath) -> Iterable[tuple[How, str]]:
    """The ways of protecting that a load path is tried with, and the tables asked for."""
    yield "guard", "exact"
    yield "protect", "exact"
    if path in (PLAIN, ZERO_INIT):
        yield "guard", "fp32"
        yield "protect", "fp32"
    elif path is not THROUGH_DATA:  # nothing tells a guard of it that has not looked before
        yield "open guard", "exact"
    if path is CAST:
        yield "protect first", "exact"


def cells(
    style: Style,
    library: Library = safe_rope,  # type: ignore[assignment]
    paths: Sequence[LoadPath] = PATHS,
) -> list[Cell]:
    """Look at every cell of ``style`` under each of ``paths``."""
    found = []
    for path in paths:
        if path.name in style.not_on:
            continue
        stock = run(style, path)
        for how, tables in ways(path):
            kind, reason = judge(style, path, stock, run(style, path, how, tables, library), tables)
            found.append(Cell(style.name, path.name, how, tables, kind, reason))
    return found


def judge(style: Style, path: LoadPath, stock: Run, guarded: Run, tables: str) -> tuple[str, str]:
    """Say what kind of cell it is, and why."""
    if guarded.error is not None:
        if stock.error is None:
            return BROKEN, guarded.error
        return BOTH_CRASH, f"stock: {stock.error}; guarded: {guarded.error}"
    damage = stock.error or damage_of(stock, style, path)
    left = damage_of(guarded, style, path, tables)
    if damage is None and left is not None and not same_bits(stock, guarded):
        return MADE_WRONG, left
    if damage is None:
        left = None
    if left is not None:
        if guarded.said:
            return NAMED, guarded.said[0]
        return SILENTLY_WRONG, f"{left} (stock: {damage})"
    if stock.error is None:
        difference = other_dtypes(stock, guarded)
        if difference is not None:
            return OTHER_DTYPES, difference
    return (RIGHT, "") if damage is None else (REPAIRED, f"stock: {damage}")


@functools.cache
def truth_of(name: str) -> Run:
    """The style as plain torch builds it in FP32."""
    truth = run(STYLES[name], PLAIN)
    if truth.error is not None:
        raise AssertionError(f"{name} does not run in FP32 without safe_rope: {truth.error}")
    return truth


def formula_of(style: Style, truth: Run) -> list[torch.Tensor] | None:
    """The leaves that a formula gives in float64 for the true FP32 frequencies."""
    if style.exact is None or truth.inv_freq is None:
        return None
    answers: list[Any] = [style.exact(truth.inv_freq, length) for length in LENGTHS]
    return torch.utils._pytree.tree_leaves(answers)


def damage_of(result: Run, style: Style, path: LoadPath, tables: str | None = None) -> str | None:
    """Say what of ``result`` is not the truth, or None.

    Args:
        result: a run without an error.
        style: what was run.
        path: how it was loaded.
        tables: what safe_rope was asked for; None for the stock model.

    """
    truth = truth_of(style.name)
    if truth.inv_freq is not None:
        held = result.inv_freq
        if held is None or held.shape != truth.inv_freq.shape:
            return f"inv_freq is {None if held is None else tuple(held.shape)}"
        if not torch.equal(held.to(truth.inv_freq.dtype), truth.inv_freq):
            return f"inv_freq in {held.dtype} is off by {_distance(held, truth.inv_freq)}"
    if [leaf.shape for leaf in result.leaves] != [leaf.shape for leaf in truth.leaves]:
        return f"returns the shapes {[tuple(leaf.shape) for leaf in result.leaves]}"
    formula = formula_of(style, truth) or [None] * len(truth.leaves)
    for index, (got, true, exact) in enumerate(zip(result.leaves, truth.leaves, formula, strict=True)):
        if got.is_complex() != true.is_complex():
            return f"result {index} is {got.dtype}, not {true.dtype}"
        if not (true.is_floating_point() or true.is_complex()):
            if not torch.equal(got, true):
                return f"result {index} is not the same integers"
        elif style.shows == "output":
            if not _close_output(got, true, path, tables):
                return f"output {index} in {got.dtype} is off by {_distance(got, true)}"
        elif not _right_table(got, true, exact, style, path, tables):
            return f"table {index} in {got.dtype} is off by {_distance(got, true)}"
    return None


def _right_table(
    got: torch.Tensor,
    true: torch.Tensor,
    exact: torch.Tensor | None,
    style: Style,
    path: LoadPath,
    tables: str | None,
) -> bool:
    reaches = path.lowest if style.widens and path.lowest in LOW else got.dtype
    if got.is_complex():
        got, true = torch.view_as_real(got), torch.view_as_real(true)
        exact = torch.view_as_real(exact) if exact is not None and exact.is_complex() else exact
    low = reaches in LOW
    rounding = 1.01 * style.roundings * torch.finfo(reaches).eps / 2 if low else 0.0
    same = (got == true.to(got.dtype)) | (got == true.to(reaches if low else got.dtype).to(got.dtype))
    if tables == "fp32" and not (low and style.roundings > 1):
        return bool(same.all())
    if tables == "exact" and exact is not None:
        return bool((same | ((got.double() - exact).abs() <= _ulp(exact) + rounding * exact.abs())).all())
    true = true.double()
    slack = PHASE * true.abs().clamp(min=1) + rounding * true.abs()
    return bool((same | ((got.double() - true).abs() <= slack)).all())


OUTPUT_ROUNDINGS = 4
"""How many roundings of a low dtype, of the largest element, a model's output may be off by."""


def _close_output(got: torch.Tensor, true: torch.Tensor, path: LoadPath, tables: str | None) -> bool:
    scale = float(true.abs().max().clamp(min=1e-3))
    if path.lowest in LOW:
        slack = OUTPUT_ROUNDINGS * torch.finfo(path.lowest).eps / 2 * scale
    elif tables == "fp32":
        return torch.equal(got, true)
    else:
        slack = 2 * PHASE * scale
    return bool(((got.double() - true.double()).abs() <= slack).all())


def _ulp(exact: torch.Tensor) -> torch.Tensor:
    """The distance of two FP32 numbers at each of the values."""
    exponent = torch.frexp(exact.abs().clamp(min=2.0**-126))[1]
    return torch.ldexp(torch.ones_like(exact), exponent - 24)


def _distance(got: torch.Tensor, true: torch.Tensor) -> str:
    if got.is_complex() and true.is_complex():
        got, true = torch.view_as_real(got), torch.view_as_real(true)
    return f"{float((got.double() - true.double()).abs().max()):.2g}"


def same_bits(stock: Run, guarded: Run) -> bool:
    """Whether the two runs gave the same, to the bit."""
    pairs = zip([*stock.leaves, stock.inv_freq], [*guarded.leaves, guarded.inv_freq], strict=False)
    return len(stock.leaves) == len(guarded.leaves) and all(
        before is after is None
        or (before is not None and after is not None and torch.equal(before, after.to(before.dtype)))
        for before, after in pairs
    )


def other_dtypes(stock: Run, guarded: Run) -> str | None:
    """Say what has another dtype, or another name, than without safe_rope.

    A cast makes real numbers of complex ones: what has become of those without safe_rope is no dtype to keep.
    """
    for index, (before, after) in enumerate(zip(stock.dtypes, guarded.dtypes, strict=False)):
        if before != after and before.is_complex == after.is_complex:
            return f"result {index} is {after}, and {before} without"
    if list(stock.saved) != list(guarded.saved):
        return f"state_dict has {sorted(set(stock.saved) ^ set(guarded.saved))} in only one of the two"
    for name, dtype in stock.saved.items():
        if guarded.saved[name] != dtype and not guarded.saved[name].is_complex:  # a cast drops half of it
            return f"{name} is saved as {guarded.saved[name]}, and {dtype} without"
    return None


def summary(found: Iterable[Cell]) -> str:
    """Return the count of each kind, one line each."""
    counts = Counter(cell.kind for cell in found)
    return "\n".join(f"{counts[kind]:6d}  {kind}" for kind in (*GOOD, *BAD))


def as_data(found: Iterable[Cell]) -> list[dict[str, str]]:
    """Return the cells as plain data, for JSON."""
    return [asdict(cell) for cell in found]
