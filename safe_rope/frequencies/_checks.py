"""What makes a RopeSpec contradict itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

from safe_rope.errors import ConfigError
from safe_rope.frequencies._formulas import YARN_BETA_FAST, YARN_BETA_SLOW

if TYPE_CHECKING:
    from safe_rope.frequencies import RopeSpec

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check(spec: RopeSpec) -> None:
    """Refuse a spec that contradicts itself or lacks what its rope type needs.

    Raises:
        ConfigError: says what was expected, what came, and what to do.
    """
    faults = itertools.chain(_of_type(spec), _of_dimensions(spec), _of_numbers(spec), _of_variants(spec))
    for expected, got, remedy in faults:
        raise ConfigError(f"expected {expected}, got {got!r}; {remedy}")


Faults = Iterator[tuple[str, object, str]]
"""What was expected, what came, and what to do; each is looked for if there was none before it."""


def _of_type(spec: RopeSpec) -> Faults:
    if spec.rope_type not in ROPE_TYPES:
        remedy = "correct rope_type, or keep this module unprotected"
        yield f"rope_type to be one of {', '.join(ROPE_TYPES)}", spec.rope_type, remedy
    for name in _REQUIRED.get(spec.rope_type, ()):
        if getattr(spec, name) is None:
            remedy = (
                f"add {name} to the config's rope_scaling or rope_parameters (lengths: to the config itself)"
            )
            yield f"{name} for rope_type {spec.rope_type!r}", None, remedy


def _of_dimensions(spec: RopeSpec) -> Faults:
    if not (isinstance(spec.rotary_dim, int) and spec.rotary_dim > 0 and spec.rotary_dim % 2 == 0):
        remedy = "check head_dim and partial_rotary_factor, or pass rotary_dim"
        yield "rotary_dim to be a positive even integer", spec.rotary_dim, remedy
    if not (isinstance(spec.head_dim, int) and spec.head_dim >= spec.rotary_dim):
        expected = f"head_dim to be an integer of at least rotary_dim = {spec.rotary_dim}"
        yield expected, spec.head_dim, "check head_dim and partial_rotary_factor, or pass head_dim"
    if spec.rope_type == "proportional":
        if spec.rotary_dim != spec.head_dim:
            expected = (
                f"rotary_dim to be head_dim = {spec.head_dim} for proportional RoPE, which pads with zeros"
            )
            yield expected, spec.rotary_dim, "leave rotary_dim out and give partial_rotary_factor"
        part = spec.partial_rotary_factor
        if not (_is_number(part) and 0 <= part <= 1):
            yield "partial_rotary_factor between 0 and 1", part, "correct it in rope_parameters"


def _of_numbers(spec: RopeSpec) -> Faults:
    if not (_is_number(spec.rope_theta) and spec.rope_theta > 0):
        yield "rope_theta to be a positive finite number", spec.rope_theta, "correct rope_theta in the config"
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        length = getattr(spec, name)
        if not (length is None or (isinstance(length, int) and length > 0)):
            yield f"{name} to be a positive integer", length, f"correct {name} in the config"
    for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        value = getattr(spec, name)
        if not (value is None or (_is_number(value) and value >= 0)):
            yield f"{name} to be a finite number, not negative", value, f"correct {name}, or leave it out"
    # longrope's factor is the ratio of two lengths and may be below one: transformers then scales by one.
    factor = 1.0 if spec.factor is None or spec.rope_type == "longrope" else spec.factor
    if not (_is_number(factor) and factor >= 1):
        yield "factor to be a number of at least 1", factor, "give the ratio of new to trained length"
    for name in ("short_factor", "long_factor"):
        values = getattr(spec, name) or ()
        if not all(_is_number(value) and value > 0 for value in values):
            expected = f"every entry of {name} to be a positive finite number"
            yield expected, values, f"correct {name} in the config"
    if spec.rope_type == "yarn":
        fast, slow = spec.beta_fast or YARN_BETA_FAST, spec.beta_slow or YARN_BETA_SLOW
        if not fast >= slow:
            yield "beta_fast >= beta_slow", (fast, slow), "exchange them, or leave them out (32, 1)"
        if spec.rope_theta == 1:
            yield "rope_theta other than 1 for yarn", spec.rope_theta, "correct rope_theta in the config"
    if spec.rope_type == "llama3":
        low, high = spec.low_freq_factor, spec.high_freq_factor
        if not (_is_number(low) and _is_number(high) and 0 < low < high):
            yield "0 < low_freq_factor < high_freq_factor", (low, high), "exchange or correct them"


def _of_variants(spec: RopeSpec) -> Faults:
    if spec.rope_type == "dynamic" and not spec.rotary_dim > 2:
        expected = "rotary_dim > 2 for dynamic NTK, whose exponent is D / (D - 2)"
        yield expected, spec.rotary_dim, "use another rope_type"
    if spec.rope_type == "longrope":
        if spec.original_max_position_embeddings == 1:
            expected = "original_max_position_embeddings > 1 for longrope, which divides by its logarithm"
            yield expected, 1, "correct it in the config"
        for name in ("short_factor", "long_factor"):
            count, pairs = len(getattr(spec, name)), spec.rotary_dim // 2
            if count != pairs:
                remedy = "give one factor per pair of channels, or correct head_dim and partial_rotary_factor"
                yield f"{name} to have rotary_dim // 2 = {pairs} entries", count, remedy
        if spec.attention_factor is None and spec.factor is None:
            expected = "factor, attention_factor, or max_position_embeddings to derive them from"
            yield expected, None, "add one of them to the config"
