"""Where a damaged table comes from: compare it with what each known kind of damage would have made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._audit.reference import CosSinTable, PhaseReference, compare, halves, rounded_like
from safe_rope._audit.report import Where
from safe_rope._base.dtypes import LOW, dtype_name, low_dtype_of
from safe_rope._base.tensors import in_real_numbers
from safe_rope._recognition.explained import is_cast, is_unfilled

_SAMPLED_ROWS = 1024
_NEAR = 2.0**-3
"""Relative: a frequency whose exponent was rounded to 8 bits is nearer than that for any usual theta."""


class Explanation(NamedTuple):
    """How a table came to be what it is: in words, at which step, and whether that is certain.

    ``shown`` says that the values themselves show the damage; else another formula may have given them.
    """

    said: str
    where: Where | None
    certain: bool = True
    shown: bool = True


UNRELATED = Explanation(
    "uninitialised (made on the meta device, then to_empty) or overwritten: the values are unrelated to "
    "what the config asks for",
    "loading",
)
UNEXPLAINED = Explanation(
    "not what its constructor gives: overwritten, uninitialised, or another formula",
    "loading",
    certain=False,
    shown=False,
)
BUILT_FROM = "were built from inv_freq as it is"
"""What is said of answers that follow from the frequencies that a module holds, and from no others."""
_ROUNDED_FACTOR = 2.0**-7
"""Relative: more than 16 bits make of a factor that all of a table's values have."""
_FEW = 0.25
"""Of the values of a table: what is rounded differs in more of them."""
_MOVED = 0.5
"""Of the values of a table that are all its own: another order of channels moves more of them."""
_INTERCEPTED = "constructor intercepted or default dtype"


def explain_table(actual: Tensor, expected: Tensor, replays: Iterable[Tensor | None]) -> Explanation:
    """Say how ``actual``, a damaged table on CPU, came from ``expected``, FP32 of the same shape.

    ``replays``: what its constructor makes of it under each of the conditions that damage tables.
    """
    dtype = dtype_name(actual.dtype)
    if expected.is_complex() and not actual.is_complex():
        return Explanation(f"{dtype}: a cast has left its imaginary part behind (module cast)", "module cast")
    if actual.is_complex() and expected.is_complex():
        actual, expected = in_real_numbers(actual), in_real_numbers(expected)
    values, true = actual.reshape(-1).double(), expected.reshape(-1).double()
    if not torch.equal(values.isfinite(), true.isfinite()):
        return UNRELATED
    rounded = rounded_like(actual, expected)
    if rounded is not None:
        cast = rounded == actual.dtype
        said = dtype if cast else f"{dtype_name(rounded)}-rounded values in a {dtype} tensor"
        if actual.dtype in LOW:
            return Explanation(f"{said} (module cast)", "module cast")
        return Explanation(f"{said} (constructor intercepted)", "constructor")
    if len(true) > 1 and bool(true.all()) and bool(values[0]) and not bool(values[1:].any()):
        said = f"computed in float16, in which theta is infinite: all but the first are 0 ({_INTERCEPTED})"
        return Explanation(said, "constructor")
    off = values != true
    said = f"written to, or built from damaged numbers: {int(off.sum())} of {len(off)} values differ"
    if is_written_to(actual, expected):  # or made so by a formula that ``expected`` is not of
        return Explanation(said, "constructor", certain=False)
    for replay in replays:
        if replay is not None and not actual.is_complex():
            replay = in_real_numbers(replay)
        if replay is not None and replay.shape == actual.shape and is_cast(actual, replay):
            return Explanation(f"{dtype}, computed in 16 bits ({_INTERCEPTED})", "constructor")
    near = bool(((values - true).abs() <= _NEAR * true.abs()).all())
    low = low_dtype_of(values.float())
    if near and _is_scaled(values, true, torch.finfo(low or torch.float32).eps):
        return UNEXPLAINED
    if near and low is not None:
        widened = "" if actual.dtype == low else f" and widened to {dtype}"
        return Explanation(f"computed in {dtype_name(low)}{widened} ({_INTERCEPTED})", "constructor")
    if is_unfilled(actual, expected):
        return UNRELATED
    if near:
        return Explanation(said, "constructor", shown=False)
    return UNEXPLAINED


def _is_scaled(values: Tensor, true: Tensor, eps: float) -> bool:
    """Whether ``values`` are ``true`` by one factor, and that is more than a rounding of it makes."""
    if len(true) < 2:  # one number always is
        return False
    largest = int(true.abs().argmax())
    factor = float(values[largest] / true[largest])
    off = (values - factor * true).abs()
    return abs(factor - 1) > _ROUNDED_FACTOR and bool((off <= 2 * eps * true.abs()).all())


def is_written_to(actual: Tensor, expected: Tensor) -> bool:
    """Whether ``actual`` is ``expected`` but for a few values, or for some that stand in other places."""
    if actual.is_complex() and expected.is_complex():
        actual, expected = in_real_numbers(actual), in_real_numbers(expected)
    values, true = actual.reshape(-1).double(), expected.reshape(-1).double()
    off = float((values != true).double().mean()) if len(true) else 1.0
    return off < _FEW or (off <= _MOVED and bool(torch.isin(values, true).all()))


def explain_cos_sin(
    what: str,
    reference: PhaseReference,
    tables: list[CosSinTable],
    inv_freq: Explanation | None = None,
) -> Explanation:
    """Say how the first damaged one of ``tables`` came to be; ``inv_freq``, how the module's own did."""
    is_forward = what.startswith("forward")
    for table in tables:
        errors, layout = compare(reference, table)
        if not errors.damaged:
            continue
        how = _match(table, layout, reference)
        if how == BUILT_FROM and inv_freq is not None:
            return inv_freq._replace(said=f"{what} {how}: {inv_freq.said}")
        if how is not None:
            at_rest: Where = "module cast" if how.endswith("(cast)") else "constructor"
            return Explanation(f"{what} {how}", "forward" if is_forward else at_rest)
        if is_forward:
            said = "forward returns something else, although the tensors that it reads are right"
            return Explanation(said, "forward", certain=False, shown=False)
        if _is_unfilled(table, layout, reference):
            return UNRELATED
        if float((errors.excess > 1).double().mean()) > 0.5:
            return UNEXPLAINED
        return Explanation(f"{what} were written to in some rows", "loading", certain=False)
    return Explanation(f"{what} are damaged in a way that is not known", "loading", certain=False)


def _match(table: CosSinTable, layout: str, reference: PhaseReference) -> str | None:
    """Tell what kind of damage gives these values, one of each pair, in a sample of the rows."""
    cos, sin, positions = _sampled(table, layout, reference)
    held = low_dtype_of(torch.stack((cos, sin)))
    rounding = 0.0 if held is None else torch.finfo(held).eps / 2
    for how, phases in _hypotheses(positions, table.length, reference):
        slack = 2.0**-18 * phases.abs().clamp(min=1.0) + rounding * reference.scaling
        off_cos = (cos - phases.cos() * reference.scaling).abs()
        off_sin = (sin - phases.sin() * reference.scaling).abs()
        if not bool((torch.maximum(off_cos, off_sin) <= slack).all()):
            continue
        if how:
            return how
        if held is not None and table.cos.dtype == held:
            return f"are {dtype_name(held)} (cast)"
        if held is not None:
            return f"hold {dtype_name(held)}-rounded values in {dtype_name(table.cos.dtype)}"
    return None


def _sampled(table: CosSinTable, layout: str, reference: PhaseReference) -> tuple[Tensor, Tensor, Tensor]:
    """Values of cos and sin, one of each pair, in a sample of the rows, float64 CPU, and their positions."""
    indices = torch.arange(len(table.positions))
    rows = torch.cat((indices[:_SAMPLED_ROWS], indices[_SAMPLED_ROWS:][-_SAMPLED_ROWS:]))
    pairs = len(reference.base)
    split_cos = halves(table.cos[rows.to(table.cos.device)], pairs, layout)
    split_sin = halves(table.sin[rows.to(table.sin.device)], pairs, layout)
    positions = table.positions[rows].repeat(len(split_cos))
    cos, sin = (torch.cat(split).to("cpu", torch.float64) for split in (split_cos, split_sin))
    return cos, sin, positions


def _is_unfilled(table: CosSinTable, layout: str, reference: PhaseReference) -> bool:
    """Whether cos or sin look like memory that nobody has written to."""
    cos, sin, positions = _sampled(table, layout, reference)
    phases = reference.phases(positions, table.length)
    return is_unfilled(cos, phases.cos()) or is_unfilled(sin, phases.sin())


def _hypotheses(positions: Tensor, length: int, reference: PhaseReference) -> Iterator[tuple[str, Tensor]]:
    """Each kind of damage with the phases that it gives, float64 ``[n, rotary_dim // 2]``; "" for none."""
    frequencies, divisor = reference.for_length(length), reference.divisor

    def phases(steps: Tensor, inv_freq: Tensor) -> Tensor:
        return (steps.to(torch.float64) / divisor)[:, None] * inv_freq.to("cpu", torch.float64)

    yield "", reference.phases(positions, length)
    for low in LOW:
        name, rounded, low_frequencies = dtype_name(low), positions.to(low), frequencies.to(low)
        yield f"were built from positions rounded to {name}", phases(rounded, frequencies)
        yield f"were built from inv_freq rounded to {name}", phases(positions, low_frequencies)
        product = (rounded / divisor)[:, None] * low_frequencies
        yield f"were computed in {name} (positions, inv_freq and their product)", product.to(torch.float64)
    shown = getattr(reference.module, f"{reference.prefix}inv_freq", None)
    if isinstance(shown, Tensor) and not shown.is_meta and shown.shape == frequencies.shape:
        yield BUILT_FROM, phases(positions, shown.detach())
