"""What makes a RopeSpec contradict itself."""

from __future__ import annotations

import math
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


def _require(condition: bool, expected: str, got: object, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"expected {expected}, got {got}; {remedy}")


def check(spec: RopeSpec) -> None:
    """Refuse a spec that contradicts itself or lacks what its rope type needs.

    Raises:
        ConfigError: says what was expected, what came, and what to do.
    """
    _require(
        spec.rope_type in ROPE_TYPES,
        f"rope_type to be one of {', '.join(ROPE_TYPES)}",
        repr(spec.rope_type),
        "correct rope_type, or keep this module unprotected",
    )
    for name in _REQUIRED.get(spec.rope_type, ()):
        _require(
            getattr(spec, name) is not None,
            f"{name} for rope_type {spec.rope_type!r}",
            "none",
            f"add {name} to the config's rope_scaling or rope_parameters (lengths: to the config itself)",
        )
    _check_dimensions(spec)
    _check_numbers(spec)
    if spec.rope_type == "dynamic":
        _require(
            spec.rotary_dim > 2,
            "rotary_dim > 2 for dynamic NTK, whose exponent is D / (D - 2)",
            spec.rotary_dim,
            "use another rope_type",
        )
    if spec.rope_type == "longrope":
        _require(
            spec.original_max_position_embeddings != 1,
            "original_max_position_embeddings > 1 for longrope, which divides by its logarithm",
            1,
            "correct it in the config",
        )
        for name in ("short_factor", "long_factor"):
            count = len(getattr(spec, name))
            _require(
                count == spec.rotary_dim // 2,
                f"{name} to have rotary_dim // 2 = {spec.rotary_dim // 2} entries",
                count,
                "give one factor per pair of channels, or correct head_dim and partial_rotary_factor",
            )
        _require(
            spec.attention_factor is not None or spec.factor is not None,
            "factor, attention_factor, or max_position_embeddings to derive them from",
            "none",
            "add one of them to the config",
        )


def _check_dimensions(spec: RopeSpec) -> None:
    _require(
        isinstance(spec.rotary_dim, int) and spec.rotary_dim > 0 and spec.rotary_dim % 2 == 0,
        "rotary_dim to be a positive even integer",
        repr(spec.rotary_dim),
        "check head_dim and partial_rotary_factor, or pass rotary_dim",
    )
    _require(
        isinstance(spec.head_dim, int) and spec.head_dim >= spec.rotary_dim,
        f"head_dim to be an integer of at least rotary_dim = {spec.rotary_dim}",
        repr(spec.head_dim),
        "check head_dim and partial_rotary_factor, or pass head_dim",
    )
    if spec.rope_type == "proportional":
        _require(
            spec.rotary_dim == spec.head_dim,
            f"rotary_dim to be head_dim = {spec.head_dim} for proportional RoPE, which pads with zeros",
            spec.rotary_dim,
            "leave rotary_dim out and give partial_rotary_factor",
        )
        _require(
            _is_number(spec.partial_rotary_factor) and 0 <= spec.partial_rotary_factor <= 1,
            "partial_rotary_factor between 0 and 1",
            spec.partial_rotary_factor,
            "correct it in rope_parameters",
        )


def _check_numbers(spec: RopeSpec) -> None:
    _require(
        _is_number(spec.rope_theta) and spec.rope_theta > 0,
        "rope_theta to be a positive finite number",
        spec.rope_theta,
        "correct rope_theta in the config",
    )
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        length = getattr(spec, name)
        _require(
            length is None or (isinstance(length, int) and length > 0),
            f"{name} to be a positive integer",
            repr(length),
            f"correct {name} in the config",
        )
    for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        value = getattr(spec, name)
        _require(
            value is None or (_is_number(value) and value >= 0),
            f"{name} to be a finite number, not negative",
            value,
            f"correct {name}, or leave it out",
        )
    # longrope's factor is the ratio of two lengths and may be below one: transformers then scales by one.
    factor = 1.0 if spec.factor is None or spec.rope_type == "longrope" else spec.factor
    _require(
        _is_number(factor) and factor >= 1,
        "factor >= 1",
        factor,
        "give the ratio of new to trained length",
    )
    for name in ("short_factor", "long_factor"):
        values = getattr(spec, name) or ()
        _require(
            all(_is_number(value) and value > 0 for value in values),
            f"every entry of {name} to be a positive finite number",
            values,
            f"correct {name} in the config",
        )
    if spec.rope_type == "yarn":
        fast, slow = spec.beta_fast or YARN_BETA_FAST, spec.beta_slow or YARN_BETA_SLOW
        _require(
            fast >= slow,
            "beta_fast >= beta_slow",
            f"{fast} and {slow}",
            "exchange them, or leave them out (32, 1)",
        )
        _require(
            spec.rope_theta != 1,
            "rope_theta other than 1 for yarn",
            spec.rope_theta,
            "correct rope_theta in the config",
        )
    if spec.rope_type == "llama3":
        low, high = spec.low_freq_factor, spec.high_freq_factor
        _require(
            _is_number(low) and _is_number(high) and 0 < low < high,
            "0 < low_freq_factor < high_freq_factor",
            f"{low} and {high}",
            "exchange or correct them",
        )
