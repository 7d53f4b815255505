"""What a rotary module's tensors and results should be, in float64, and how far measured ones are off."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from safe_rope._audit.report import BAD_RADIANS, MeasuredRow
from safe_rope._base.dtypes import LOW
from safe_rope._protection.frequency_sets import Frequencies, spec_now
from safe_rope._recognition.specs import (
    Convention,
    divides_positions,
    read_spec,
    shown_spec,
    trained_length,
)
from safe_rope.errors import UnsupportedModelError
from safe_rope.frequencies import RopeSpec
from safe_rope.registry import RopePatch
from safe_rope.rotation import plain

TOLERANCE = 2.0**-20
"""Relative to a phase, and absolute below 1 rad: eight ulps of FP32.

Measured on CPU at positions up to 131,071, stock FP32 modules of every rope type reach 2**-22.8 (position,
product, cos and sin are each rounded). A device whose ``pow`` is off by 4 ulps stays under the tolerance too.
The mildest damage, one rounding to float16, is 2**-12.
"""

_ROWS = 8192
_FEWEST = 4
"""Frequencies, less one, from which it can be told that they are those of another rope_theta."""

_UNEXPLAINED = 2.0**-6
"""Radians: cos and sin that were rounded to bfloat16 turn a pair by less."""


class CosSinTable(NamedTuple):
    """What was measured: values of cos and sin, and what they belong to.

    Attributes:
        cos: ``[n, rotary_dim]`` or ``[n, rotary_dim // 2]``, any dtype and device.
        sin: as ``cos``.
        positions: int64 CPU ``[n]``.
        length: the length of the sequence that they are for; 0 where it makes no difference.
        computed_from: the frequencies that the positions were multiplied by, float64 CPU
            ``[rotary_dim // 2]``, where the module tells them; they say how many turns a phase is off.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    length: int
    computed_from: Tensor | None = None


class PhaseReference:
    """One rotary embedding of a module as its spec asks for it.

    ``base``: the frequencies that its constructor makes, which may be others than its config's. ``kept``:
    what a protected module goes by, which its config may not say any more.

    Attributes:
        spec: what the module was built for.
        prefix: what its tensors' names start with, "" or the layer type and an underscore.
        divisor: what the module divides positions by (linear scaling; Llama before transformers 4.43), or 1.
        base: FP32 CPU ``[rotary_dim // 2]``, the frequencies of a sequence of the trained length.
        original: as ``base``, what ``original_inv_freq`` should hold.
        layouts: the layouts that cos and sin may have; one where a patch says which.
        farthest: the largest distance that matters: the model's announced length, or the window of the layers
            that use this embedding.

    Raises:
        ConfigError, UnsupportedModelError: as `read_spec` does; or the constructor makes other frequencies
            than the config's, and they depend on the length of a sequence.
    """

    def __init__(
        self,
        module: nn.Module,
        patch: RopePatch | None,
        layer_type: str | None,
        convention: Convention,
        base: Tensor | None = None,
        kept: Frequencies | None = None,
    ) -> None:
        self.module = module
        self.layer_type = layer_type
        self.convention = convention
        self.spec = (
            read_spec(module, patch, layer_type) if kept is None else spec_now(module, layer_type, kept.spec)
        )
        self.prefix = "" if layer_type is None else f"{layer_type}_"
        self.scaling = (self.spec if kept is None else kept.spec).attention_scaling
        self._long = kept.long if kept is not None and kept.is_asked else None
        divides = divides_positions(module, self.spec)
        self.divisor = (self.spec.factor or 1.0) if divides else 1.0
        self.base = shown_spec(module, self.spec).inv_freq()
        self.layouts = ("half", "interleaved") if patch is None else (patch.layout,)
        if base is not None and base.shape == self.base.shape and relative_error(base, self.base) > TOLERANCE:
            if self.spec.depends_on_length and kept is None:
                raise UnsupportedModelError("its frequencies follow the length by a rule that is not known")
            self.base = base
        self.original = self.base
        if kept is not None and not self.spec.depends_on_length:
            self.base = kept.inv_freq
        window = _window(module, layer_type)
        self.farthest = min(self.max_position, window or self.max_position)

    @property
    def max_position(self) -> int:
        """The model's longest announced sequence; 2048 where nothing says so."""
        return self.spec.max_position_embeddings or 2048

    def cached_length(self) -> Any:
        """How long a sequence the module is set up for now: an int, a tensor, or 0."""
        noted = getattr(self.module, f"{self.prefix}max_seq_len_cached", None)
        known = 0 if noted is None else noted
        return known if known > self.max_position else self.unnoted_length(self.module) or known

    def unnoted_length(self, module: nn.Module) -> int:
        """Return the length that dynamic NTK's frequencies in ``module`` are for; 0 for the trained one.

        transformers before 4.43 and from 5.0 to 5.12 does not note it.
        """
        if self.spec.rope_type != "dynamic" or self.convention == "length":
            return 0
        inv_freq = getattr(module, f"{self.prefix}inv_freq", None)
        spec, pairs = self.spec, len(self.base)
        if not isinstance(inv_freq, Tensor) or inv_freq.is_meta or inv_freq.shape != (pairs,) or pairs < 2:
            return 0
        slowest = float(plain(inv_freq).detach()[-1])
        if not 0.0 < slowest < 1.0:
            return 0
        dim, factor = spec.rotary_dim, spec.factor or 1.0
        theta = slowest ** (-dim / (2 * (pairs - 1)))
        stretch = (theta / spec.rope_theta) ** ((dim - 2) / dim)
        length: int = round((stretch + factor - 1) * self.max_position / factor)
        is_length = self.max_position < length < 2**31  # else garbage, of which no length can be made
        if not is_length or relative_error(inv_freq, self.for_length(length)) > TOLERANCE:
            return 0
        return length

    def expected(self, name: str, values: Tensor | None = None) -> Tensor | None:
        """What the tensor ``name`` (``*inv_freq``) should hold now, FP32 CPU; None where that is unknown.

        ``values`` stand for what the module holds.
        """
        spec, rest = self.spec, name.removeprefix(self.prefix)
        if rest == "original_inv_freq":
            return self.original
        if rest == "inv_freq" and not spec.depends_on_length:
            return self.base
        if spec.rope_type == "longrope" and rest in ("inv_freq", "long_inv_freq"):
            long = self._long_inv_freq()
            actual = getattr(self.module, name).detach() if values is None else values
            # Whichever the last sequence needed is there; a meta tensor has no values to tell.
            if rest == "inv_freq" and (
                actual.is_meta or relative_error(actual, self.base) <= relative_error(actual, long)
            ):
                return self.base
            return long
        if rest != "inv_freq":
            return None
        return self.for_length(self.cached_length())

    def tells(self, name: str, values: Tensor | None) -> bool:
        """Whether the tensor ``name`` should hold ``values`` now."""
        if values is None or values.is_meta or values.shape != self.base.shape:
            return False
        expected = self.expected(name, values)
        return expected is not None and relative_error(values, expected) <= TOLERANCE

    def for_length(self, length: Any) -> Tensor:
        """Return the frequencies, FP32 CPU ``[rotary_dim // 2]``, that a sequence of ``length`` asks for."""
        spec = self.spec
        if spec.rope_type == "longrope":
            is_long = int(length) > trained_length(self.module, self.layer_type, spec)
            return self._long_inv_freq() if is_long else self.base
        if not spec.depends_on_length or length <= self.max_position:
            return self.base
        return spec.inv_freq_below(length) if self.convention == "positions" else spec.inv_freq(int(length))

    def _long_inv_freq(self) -> Tensor:
        if self._long is not None:
            return self._long
        return self.spec.inv_freq((self.spec.original_max_position_embeddings or 0) + 1)

    def is_of_another_config(self, actual: Tensor) -> bool:
        """Whether ``actual``, what inv_freq holds in place of ``base``, is what another config asks for.

        A config can be changed after a module has been built from it. Frequencies of another rope_theta or
        factor say so, unless rounding gives that. longrope's factors are whatever somebody has found.
        """
        if actual.dtype in LOW or actual.dim() != 1 or not bool((actual.isfinite() & (actual >= 0)).all()):
            return False
        if self.spec.rope_type == "longrope":
            return True
        plain = self.spec.unscaled()
        specs = (self.spec, plain, replace(plain, rope_type="linear", factor=1.0))
        return any(_is_of_another(spec, actual.detach().cpu()) for spec in specs)

    def phases(self, positions: Tensor, length: Any = 0) -> Tensor:
        """Exact phases in a sequence of ``length``, float64 CPU ``[len(positions), rotary_dim // 2]``."""
        return positions.to(torch.float64)[:, None] * (
            self.for_length(length).to(torch.float64) / self.divisor
        )


def _is_of_another(spec: RopeSpec, actual: Tensor) -> bool:
    """Whether ``actual`` is what ``spec`` asks for with another rope_theta, or with another factor."""
    expected = spec.inv_freq().double()
    last = int(expected.count_nonzero()) - 1
    if last < _FEWEST or len(actual) != len(expected) or not bool(actual[last] > 0):
        return False
    ratio = float(actual[last].double() / expected[last])
    others = [(spec.rope_theta * ratio ** (-len(actual) / last), spec.factor)]
    if spec.factor is not None and spec.factor / ratio >= 1:
        others.append((spec.rope_theta, spec.factor / ratio))
    rounded = [float(torch.tensor(spec.rope_theta, dtype=low)) for low in LOW]
    return any(
        math.isfinite(theta)
        and not any(abs(theta - low) < 1e-6 * theta for low in rounded if low != spec.rope_theta)
        and relative_error(actual, replace(spec, rope_theta=theta, factor=factor).inv_freq()) <= TOLERANCE
        for theta, factor in others
    )


def _window(module: nn.Module, layer_type: str | None) -> int | None:
    """How far the layers attend that use this embedding; None where some attend to everything."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None) or ()
    if layer_type is not None:
        types = (layer_type,)
    for kind, name in (
        ("sliding_attention", "sliding_window"),
        ("chunked_attention", "attention_chunk_size"),
    ):
        try:
            size = getattr(config, name, None)
        except RuntimeError:  # layers that differ have no common one
            continue
        if types and isinstance(size, int) and all(one == kind for one in types):
            return size
    return None


class Errors(NamedTuple):
    """Per measured position: float64 CPU ``[n]`` each; ``excess`` is the error over what is tolerated."""

    positions: Tensor
    phase: Tensor
    cos: Tensor
    excess: Tensor

    @property
    def damaged(self) -> bool:
        """Whether an error is beyond the tolerance."""
        return bool((self.excess > 1).any())

    def measured(self) -> dict[str, Any]:
        """What a `Finding` says of them."""
        return {
            "phase_error_rad": float(self.phase.max()),
            "cos_error": float(self.cos.max()),
            "first_bad_position": first_of(self.positions, self.phase > BAD_RADIANS),
            "first_damaged_position": first_of(self.positions, self.excess > 1),
        }

    def rows(self, layer_type: str | None, within: float = math.inf) -> list[MeasuredRow]:
        """One row a position; those up to ``within`` matter."""
        columns = (column.tolist() for column in self)
        return [
            MeasuredRow(position, phase, cos, excess <= 1, layer_type, position <= within)
            for position, phase, cos, excess in zip(*columns, strict=True)
        ]

    @staticmethod
    def joined(parts: list[Errors]) -> Errors:
        """Return the measurements of several calls as one."""
        return Errors(*(torch.cat(column) for column in zip(*parts, strict=True)))


def first_of(positions: Tensor, mask: Tensor) -> int | None:
    """Return the first of ``positions`` where ``mask`` is set."""
    found = positions[mask]
    return int(found.min()) if found.numel() else None


def angle_between(cos: Tensor, sin: Tensor, true_cos: Tensor, true_sin: Tensor) -> Tensor:
    """Return by how many radians each pair is turned against the true one, -pi to pi."""
    return torch.atan2(sin * true_cos - cos * true_sin, cos * true_cos + sin * true_sin)


def halves(table: Tensor, pairs: int, layout: str) -> tuple[Tensor, ...]:
    """Split ``[n, rotary_dim]`` into the two values of every pair; ``[n, pairs]`` is there once."""
    if table.shape[-1] == pairs:
        return (table,)
    if layout == "half":
        return table[..., :pairs], table[..., pairs:]
    return table[..., ::2], table[..., 1::2]


def compare(reference: PhaseReference, table: CosSinTable) -> tuple[Errors, str]:
    """Measure ``table`` against float64; return also which layout it has."""
    results = [(_errors(reference, table, layout), layout) for layout in reference.layouts]
    return min(results, key=lambda result: float(result[0].excess.max()) if len(table.positions) else 0.0)


def _errors(reference: PhaseReference, table: CosSinTable, layout: str) -> Errors:
    pairs = len(reference.base)
    parts = []
    for all_cos, all_sin, positions in zip(
        *(torch.split(column, _ROWS) for column in table[:3]), strict=True
    ):
        phases = reference.phases(positions, table.length)
        true_cos, true_sin = phases.cos(), phases.sin()
        angle, value = torch.zeros_like(phases), torch.zeros_like(phases)
        for pair in zip(halves(all_cos, pairs, layout), halves(all_sin, pairs, layout), strict=True):
            c, s = (half.to("cpu", torch.float64) for half in pair)
            turned = angle_between(c, s, true_cos, true_sin)
            turned = _with_turns(turned, positions, phases, table.computed_from)
            off = torch.maximum(
                (c - true_cos * reference.scaling).abs(), (s - true_sin * reference.scaling).abs()
            )
            angle = torch.maximum(angle, turned.abs().nan_to_num(nan=torch.inf))
            value = torch.maximum(value, off.nan_to_num(nan=torch.inf))
        # A table of the wrong amplitude has the right angle: both are held to the tolerance.
        excess = torch.maximum(angle, value / reference.scaling) / (TOLERANCE * phases.abs().clamp(min=1.0))
        parts.append(Errors(positions, angle.amax(dim=-1), value.amax(dim=-1), excess.amax(dim=-1)))
    return Errors.joined(parts)


def _with_turns(turned: Tensor, positions: Tensor, phases: Tensor, computed_from: Tensor | None) -> Tensor:
    """Add to the angle between a pair and the true one the whole turns that its frequency is known to add.

    Only where that frequency explains the angle: positions that were rounded too turn by something else.
    """
    if computed_from is None:
        return turned
    expected = positions.to(torch.float64)[:, None] * computed_from - phases
    whole = turned + (2 * math.pi) * ((expected - turned) / (2 * math.pi)).round()
    explained = (whole - expected).abs() <= _UNEXPLAINED + 2.0**-18 * phases.abs()
    return torch.where(explained, whole, turned)


def rounded_like(actual: Tensor, expected: Tensor) -> torch.dtype | None:
    """Tell which 16-bit dtype ``actual`` (a float tensor) was rounded to on its way from ``expected``."""
    actual = actual.detach().to("cpu", torch.float32)
    return next((low for low in LOW if torch.equal(actual, expected.to(low).to(torch.float32))), None)


def sizes(largest: Tensor, positions: Tensor) -> Tensor:
    """Return for each row what an error of its values, for each step of its position, is relative to.

    What has a bound, as sines have, is as large near as far. Phases grow with the position, and an error of
    them does so from the first one on.

    Args:
        largest: the largest value of each row, float64 ``[n]``; 0 where it is no number.
        positions: int64 ``[n]``, rising.

    """
    steps = positions.double().clamp(min=1.0)
    near = largest[(positions > 0) & (largest > 0)][:1]
    first = near if len(near) else largest.max()
    return torch.maximum(largest / steps, first).clamp(min=torch.finfo(torch.float32).tiny)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest relative error; a value that should be 0 and is not counts as infinitely wrong."""
    actual, expected = actual.to("cpu", torch.float64), expected.to(torch.float64)
    off = (actual - expected).abs() / expected.abs()
    return float(torch.where(actual == expected, 0.0, off).nan_to_num(nan=torch.inf).max())
