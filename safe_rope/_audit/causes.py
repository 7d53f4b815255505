"""Where a damaged table comes from: compare it with what each known kind of damage would have made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from safe_rope._audit.reference import CosSinTable, PhaseReference, compare, halves, rounded_like
from safe_rope._audit.report import Where
from safe_rope._base.dtypes import LOW
from safe_rope._base.originals import vector

_SAMPLED_ROWS = 1024
_NEAR = 2.0**-3
"""Relative: a frequency whose exponent was rounded to 8 bits is nearer than that for any usual theta."""


class Explanation(NamedTuple):
    """How a table came to be what it is: in words, at which step, and whether that is certain."""

    said: str
    where: Where
    certain: bool = True


UNRELATED = Explanation(
    "uninitialised (made on the meta device, then to_empty) or overwritten: the values are unrelated to "
    "what the config asks for",
    "loading",
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def explain_inv_freq(name: str, actual: Tensor, reference: PhaseReference, expected: Tensor) -> Explanation:
    """Say how ``actual`` came from ``expected`` (FP32 CPU).

    It is not certain where the values could be another formula's frequencies.
    """
    values = actual.detach().to("cpu", torch.float32)
    if not bool(values.isfinite().all()):
        return UNRELATED
    dtype, rounded = dtype_name(actual.dtype), rounded_like(actual, expected)
    close = (values - expected).abs() <= _NEAR * expected.abs()
    near = bool(close.all())
    theta = reference.spec.rope_theta
    if len(values) > 1 and bool(close[0]) and not bool(values[1:].any()):
        for low in LOW:
            if theta > torch.finfo(low).max:
                said = (
                    f"{name} was computed in {dtype_name(low)}, in which theta {theta:g} is infinite: every "
                    "frequency but the first is 0 (constructor intercepted or default dtype)"
                )
                return Explanation(said, "constructor")
    if actual.dtype in LOW:
        if rounded == actual.dtype:
            return Explanation(f"{name} is {dtype} (module cast)", "module cast")
        if rounded is not None:
            said = f"{name} is {dtype} and holds {dtype_name(rounded)}-rounded values"
            return Explanation(said, "module cast")
        said = f"{name} is {dtype} and was computed in it (constructor intercepted or default dtype)"
        return Explanation(said, "constructor") if near else UNRELATED
    how = f"holds {dtype_name(rounded)}-rounded values in a {dtype} tensor" if rounded is not None else None
    for low in LOW:
        if how is None and near and _representable(values, low):
            how = f"was computed in {dtype_name(low)} and widened to {dtype}"
        if how is None and torch.equal(values, _from_rounded_exponents(reference, low)):
            how = f"was built from exponents rounded to {dtype_name(low)}"
    if how is not None:
        return Explanation(f"{name} {how} (constructor intercepted)", "constructor")
    # Every known rope type has positive frequencies that do not rise, the fastest near one radian.
    if not bool((values >= 0).all() and (values.diff() <= 0).all() and 2.0**-10 < float(values[0]) < 8.0):
        return UNRELATED
    if near:
        return Explanation(f"{name} was written to, or built from damaged numbers", "constructor")
    said = f"{name} does not follow the config: overwritten, uninitialised, or another formula"
    return Explanation(said, "loading", certain=False)


def _from_rounded_exponents(reference: PhaseReference, low: torch.dtype) -> Tensor:
    """The frequencies that default RoPE has if its exponents are rounded to ``low``; else empty."""
    spec = reference.spec
    if spec.rope_type != "default":
        return reference.base[:0]
    indices = vector(range(0, spec.rotary_dim, 2), torch.float32).to(low).to(torch.float32)
    values: Tensor = 1.0 / (spec.rope_theta ** (indices / spec.rotary_dim))
    return values


def explain_cos_sin(what: str, reference: PhaseReference, tables: list[CosSinTable]) -> Explanation:
    """Say how the first damaged one of ``tables`` came to be."""
    is_forward = what.startswith("forward")
    for table in tables:
        errors, layout = compare(reference, table)
        if not errors.damaged:
            continue
        how = _match(table, layout, reference)
        if how is not None:
            at_rest: Where = "module cast" if how.endswith("(cast)") else "constructor"
            return Explanation(f"{what} {how}", "forward" if is_forward else at_rest)
        if is_forward:
            said = "forward returns something else, although the tensors that it reads are right"
            return Explanation(said, "forward", certain=False)
        if float((errors.excess > 1).double().mean()) > 0.5:
            return UNRELATED
        return Explanation(f"{what} were written to in some rows", "loading")
    return Explanation(f"{what} are damaged in a way that is not known", "loading", certain=False)


def _match(table: CosSinTable, layout: str, reference: PhaseReference) -> str | None:
    """Tell what kind of damage gives these values, one of each pair, in a sample of the rows."""
    indices = torch.arange(len(table.positions))
    rows = torch.cat((indices[:_SAMPLED_ROWS], indices[_SAMPLED_ROWS:][-_SAMPLED_ROWS:]))
    pairs = len(reference.base)
    split_cos = halves(table.cos[rows.to(table.cos.device)], pairs, layout)
    split_sin = halves(table.sin[rows.to(table.sin.device)], pairs, layout)
    positions = table.positions[rows].repeat(len(split_cos))
    cos, sin = (torch.cat(split).to("cpu", torch.float64) for split in (split_cos, split_sin))
    held = next((low for low in LOW if _representable(cos, low) and _representable(sin, low)), None)
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


def _representable(values: Tensor, low: torch.dtype) -> bool:
    return torch.equal(values.to(low).to(values.dtype), values)


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
        yield "were built from the damaged inv_freq", phases(positions, shown.detach())
