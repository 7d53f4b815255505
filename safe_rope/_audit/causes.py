"""Where a damaged table comes from: compare it with what each known kind of damage would have made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._audit.reference import LOW, CosSinTable, Reference, compare, halves, rounded_like
from safe_rope._audit.report import Where
from safe_rope._base.originals import vector

_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

UNRELATED = (
    "uninitialised (made on the meta device, then to_empty) or overwritten: the values are unrelated to "
    "what the config asks for"
)
_SAMPLED_ROWS = 1024
_NEAR = 2.0**-3
"""Relative: a frequency whose exponent was rounded to 8 bits is nearer than that for any usual theta."""


class Explanation(NamedTuple):
    """How a table came to be what it is: in words, whether that is certain, and at which step."""

    said: str
    certain: bool
    where: Where


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def explain_inv_freq(name: str, actual: Tensor, reference: Reference, expected: Tensor) -> Explanation:
    """Say how ``actual`` came from ``expected`` (FP32 CPU).

    It is not certain where the values could be another formula's frequencies.
    """
    values = actual.detach().to("cpu", torch.float32)
    unrelated = Explanation(UNRELATED, True, "loading")
    if not bool(values.isfinite().all()):
        return unrelated
    rounded = rounded_like(actual, expected)
    if actual.dtype in LOW:
        dtype = LOW[actual.dtype]
        if rounded == dtype:
            return Explanation(f"{name} is {dtype} (module cast)", True, "module cast")
        if rounded is not None:
            return Explanation(f"{name} is {dtype} and holds {rounded}-rounded values", True, "module cast")
        if _near(values, expected):
            said = f"{name} is {dtype} and was computed in it (constructor intercepted or default dtype)"
            return Explanation(said, True, "constructor")
        return unrelated
    dtype = dtype_name(actual.dtype)
    if rounded is not None:
        said = f"{name} holds {rounded}-rounded values in a {dtype} tensor (constructor intercepted)"
        return Explanation(said, True, "constructor")
    for low, low_name in LOW.items():
        if torch.equal(values, values.to(low).to(torch.float32)) and _near(values, expected):
            said = f"{name} was computed in {low_name} and widened to {dtype} (constructor intercepted)"
            return Explanation(said, True, "constructor")
        if reference.spec.rope_type == "default" and torch.equal(values, _rounded_exponents(reference, low)):
            said = f"{name} was built from exponents rounded to {low_name} (constructor intercepted)"
            return Explanation(said, True, "constructor")
    if not _could_be_frequencies(values):
        return unrelated
    if _near(values, expected):
        return Explanation(f"{name} was written to, or built from damaged numbers", True, "constructor")
    said = f"{name} does not follow the config: overwritten, uninitialised, or another formula"
    return Explanation(said, False, "loading")


def _near(values: Tensor, expected: Tensor) -> bool:
    return bool(((values - expected).abs() <= _NEAR * expected.abs()).all())


def _rounded_exponents(reference: Reference, low: torch.dtype) -> Tensor:
    spec = reference.spec
    indices = vector(range(0, spec.rotary_dim, 2), torch.float32).to(low).to(torch.float32)
    values: Tensor = 1.0 / (spec.rope_theta ** (indices / spec.rotary_dim))
    return values


def _could_be_frequencies(values: Tensor) -> bool:
    # Every known rope type has positive frequencies that do not rise, the fastest near one radian.
    return bool((values >= 0).all() and (values.diff() <= 0).all() and 2.0**-10 < float(values[0]) < 8.0)


def explain_cos_sin(what: str, reference: Reference, tables: list[CosSinTable]) -> Explanation:
    """Say how the first damaged one of ``tables`` came to be."""
    for table in tables:
        errors, layout = compare(reference, table)
        if not errors.damaged:
            continue
        is_forward = what.startswith("forward")
        how = _match(table, layout, reference)
        if how is not None:
            cast = how.endswith("(cast)")
            where: Where = "forward" if is_forward else "module cast" if cast else "constructor"
            return Explanation(f"{what} {how}", True, where)
        if is_forward:
            said = "forward returns something else, although the tensors that it reads are right"
            return Explanation(said, False, "forward")
        most = float((errors.excess > 1).double().mean()) > 0.5
        return Explanation(UNRELATED if most else f"{what} were written to in some rows", True, "loading")
    return Explanation(f"{what} are damaged in a way that is not known", False, "loading")


def _sampled(count: int) -> Tensor:
    indices = torch.arange(count)
    return torch.cat((indices[:_SAMPLED_ROWS], indices[_SAMPLED_ROWS:][-_SAMPLED_ROWS:]))


def _match(table: CosSinTable, layout: str, reference: Reference) -> str | None:
    """Tell what kind of damage gives these values, one of each pair, in a sample of the rows."""
    rows, pairs, length = _sampled(len(table.positions)), len(reference.base), table.length
    split_cos = halves(table.cos[rows.to(table.cos.device)], pairs, layout)
    split_sin = halves(table.sin[rows.to(table.sin.device)], pairs, layout)
    positions = table.positions[rows].repeat(len(split_cos))
    cos, sin = torch.cat(split_cos), torch.cat(split_sin)
    dtype = cos.dtype
    cos, sin = cos.to("cpu", torch.float64), sin.to("cpu", torch.float64)
    held = next((low for low in LOW if _representable(cos, low) and _representable(sin, low)), None)
    rounding = _ROUNDING[held] if held is not None else 0.0
    for how, phases in _hypotheses(positions, length, reference):
        slack = 2.0**-18 * phases.abs().clamp(min=1.0) + rounding * reference.scaling
        off_cos = (cos - phases.cos() * reference.scaling).abs()
        off_sin = (sin - phases.sin() * reference.scaling).abs()
        if not bool((torch.maximum(off_cos, off_sin) <= slack).all()):
            continue
        if how:
            return how
        if held is not None:
            cast = f"are {LOW[held]} (cast)"
            return cast if dtype == held else f"hold {LOW[held]}-rounded values in {dtype_name(dtype)}"
    return None


def _representable(values: Tensor, low: torch.dtype) -> bool:
    return torch.equal(values.to(low).to(torch.float64), values)


def _hypotheses(positions: Tensor, length: int, reference: Reference) -> Iterator[tuple[str, Tensor]]:
    """Each kind of damage with the phases that it gives, float64 ``[n, rotary_dim // 2]``; "" for none."""
    exact = reference.phases(positions, length)
    yield "", exact
    frequencies = reference.for_length(length)
    divisor = reference.divisor
    shown = getattr(reference.module, f"{reference.prefix}inv_freq", None)
    for low, low_name in LOW.items():
        rounded = positions.to(low)
        steps = (rounded.to(torch.float64) / divisor)[:, None]
        low_steps, low_frequencies = (rounded / divisor)[:, None], frequencies.to(low)
        yield f"were built from positions rounded to {low_name}", steps * frequencies.to(torch.float64)
        yield (
            f"were built from inv_freq rounded to {low_name}",
            (positions.to(torch.float64) / divisor)[:, None] * low_frequencies.to(torch.float64),
        )
        yield (
            f"were computed in {low_name} (positions, inv_freq and their product)",
            (low_steps * low_frequencies).to(torch.float64),
        )
    if isinstance(shown, Tensor) and not shown.is_meta and shown.shape == frequencies.shape:
        current = shown.detach().to("cpu", torch.float64)
        yield (
            "were built from the damaged inv_freq",
            (positions.to(torch.float64) / divisor)[:, None] * current,
        )
