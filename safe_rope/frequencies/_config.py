"""Read the fields of a RopeSpec from a config object or from the content of a ``config.json``.

transformers 4 keeps ``rope_theta`` on the config and the scaling in ``rope_scaling``; transformers 5 keeps
both in ``rope_parameters``, either flat or one dict per layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from safe_rope.errors import ConfigError

# "su" is longrope's first name; "mrope" rotates by several position axes with the default frequencies.
_ALIASES = {"su": "longrope", "mrope": "default"}

_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "global_rope_theta")

# What the config classes of transformers fill in and published files of these models leave out.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"rope_theta": 10_000.0, "qk_rope_head_dim": 64},
    "gemma3_text": {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "head_dim": 256},
    "gpt_neox": {"rotary_emb_base": 10_000.0, "rotary_pct": 0.25},
    "llama": {"rope_theta": 10_000.0},
    "mistral": {"rope_theta": 10_000.0},
    "phi3": {"rope_theta": 10_000.0, "original_max_position_embeddings": 4096},
}

_OPTIONS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}


class _Source:
    """Uniform access to a config; an absent value and a None are the same."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.is_dict = isinstance(config, Mapping)
        self.defaults = _CLASS_DEFAULTS.get(str(config.get("model_type")), {}) if self.is_dict else {}

    def get(self, name: str) -> Any:
        if self.is_dict:
            value = self.config.get(name)
            return self.defaults.get(name) if value is None else value
        try:
            return getattr(self.config, name, None)
        except Exception as error:  # transformers 5 refuses attributes that differ between layers
            raise ConfigError(
                f"expected one {name} for the whole model, got an error from the config ({error}); "
                "pass layer_type"
            ) from error

    def first(self, *names: str) -> Any:
        return next((value for name in names if (value := self.get(name)) is not None), None)

    def has_rope(self) -> bool:
        if self.is_dict:
            return any(name in self.config or name in self.defaults for name in _ROPE_KEYS)
        return any(hasattr(self.config, name) for name in _ROPE_KEYS)


def read_fields(
    config: Any, layer_type: str | None, head_dim: int | None, rotary_dim: int | None
) -> dict[str, Any]:
    """Return the keyword arguments of ``RopeSpec`` that ``config`` implies.

    Raises:
        ConfigError: rope information or dimensions are missing, or of the wrong kind.
    """
    source = _Source(_resolve(config, layer_type))
    params, form = _parameters(source, layer_type)
    rope_type = _rope_type(params, form)

    max_position = _integer("max_position_embeddings", source.get("max_position_embeddings"))
    fields: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": _theta(source, params, form, layer_type),
        "max_position_embeddings": max_position,
    }
    for name in _OPTIONS.get(rope_type, ()):
        fields[name] = _number(name, params.get(name))

    partial = params.get("partial_rotary_factor")
    if partial is None:
        partial = source.first("partial_rotary_factor", "rotary_pct")
    partial = 1.0 if partial is None else _number("partial_rotary_factor", partial)
    rotary_dim = _integer("rotary_dim", rotary_dim)
    head_dim = _integer("head_dim", head_dim) or _head_dim(source, layer_type, rotary_dim)
    if rope_type == "proportional":
        fields["partial_rotary_factor"] = partial
        partial = 1.0
    fields["head_dim"] = head_dim
    fields["rotary_dim"] = int(head_dim * partial) if rotary_dim is None else rotary_dim

    if rope_type in ("yarn", "longrope", "llama3"):
        fields.update(_trained_length(source, params, form, rope_type, max_position))
    if rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            fields[name] = _numbers(name, params.get(name))
    if rope_type == "yarn":
        # transformers 5 looks for it beside the layer types, not in them.
        outer = source.get("rope_parameters") if form == "nested" else params
        fields["truncate"] = bool((outer or params).get("truncate", True))
    return fields


def _resolve(config: Any, layer_type: str | None) -> Any:
    """Return the part of ``config`` that speaks about this rotary embedding."""
    source = _Source(config)
    if not source.has_rope():
        text = source.get("text_config")
        if text is None or not _Source(text).has_rope():
            raise ConfigError(
                f"expected a config with rope_parameters, or rope_theta and rope_scaling, "
                f"got {_describe(config)} without them; "
                "pass the text model's config, loaded with AutoConfig so that its class fills in defaults"
            )
        config = text
    per_layer = None if isinstance(config, Mapping) else getattr(config, "per_layer_config", None)
    if layer_type is not None and per_layer is not None:
        try:
            return per_layer[layer_type]
        except (LookupError, TypeError, ValueError):
            return config
    return config


def _parameters(source: _Source, layer_type: str | None) -> tuple[Mapping[str, Any], str]:
    """Return the rope parameters that apply, and the form they came in: "v4", "flat" or "nested"."""
    rope_parameters, rope_scaling = source.get("rope_parameters"), source.get("rope_scaling")
    for name, value in (("rope_parameters", rope_parameters), ("rope_scaling", rope_scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"expected {name} to be a dict, got {value!r}; correct {name} in the config")
    # A file that holds both was made for both; each transformers then reads rope_scaling.
    # On a transformers 5 object, rope_scaling is only another name of rope_parameters.
    v4 = not rope_parameters or (source.is_dict and bool(rope_scaling))
    params: Mapping[str, Any] = (rope_scaling if v4 else rope_parameters) or {}

    if any(isinstance(value, Mapping) for value in params.values()):
        return _of_layer_type(params, layer_type), "nested"
    if v4 and layer_type == "sliding_attention" and source.get("rope_local_base_freq") is not None:
        return {}, "v4"
    return params, "v4" if v4 else "flat"


def _of_layer_type(nested: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    known = sorted(name for name, value in nested.items() if isinstance(value, Mapping))
    params = None if layer_type is None else nested.get(layer_type)
    if isinstance(params, Mapping):
        return params
    raise ConfigError(
        f"expected layer_type to be one of {', '.join(known)}, because rope_parameters differ between "
        f"layer types, got {layer_type!r}; pass layer_type"
    )


def _rope_type(params: Mapping[str, Any], form: str) -> str:
    rope_type = params.get("rope_type")
    if rope_type is None:
        rope_type = params.get("type")
    if rope_type is None:
        if form == "v4" and params.get("factor") is not None:
            raise ConfigError(
                "expected rope_scaling to have rope_type (or type), got a factor without it; add rope_type"
            )
        return "default"
    # The first Phi-3 checkpoints call their longrope "yarn".
    if rope_type == "yarn" and params.get("short_factor") and params.get("long_factor"):
        return "longrope"
    return _ALIASES.get(str(rope_type), str(rope_type))


def _theta(source: _Source, params: Mapping[str, Any], form: str, layer_type: str | None) -> float:
    local = source.first("rope_local_base_freq", "local_rope_theta")
    if layer_type == "sliding_attention" and local is not None:
        outer = local
    else:
        outer = source.first("rope_theta", "rotary_emb_base", "global_rope_theta")
    inner = params.get("rope_theta")
    theta = (outer if inner is None else inner) if form != "v4" else (inner if outer is None else outer)
    if theta is None and form == "v4":  # a file that holds both forms
        theta = (source.get("rope_parameters") or {}).get("rope_theta")
    if theta is None:
        raise ConfigError(
            "expected rope_theta, got a config without it; add rope_theta, or load the config with "
            "AutoConfig so that its class fills in the default"
        )
    number: float = _number("rope_theta", theta)
    return number


def _head_dim(source: _Source, layer_type: str | None, rotary_dim: int | None) -> int:
    # A config class has already copied qk_rope_head_dim to head_dim; a file may hold both.
    names = ["qk_rope_head_dim", "head_dim"] if source.is_dict else ["head_dim", "qk_rope_head_dim"]
    if source.is_dict and layer_type == "full_attention":
        names.insert(0, "global_head_dim")
    head_dim = _integer("head_dim", source.first(*names))
    if head_dim:
        return head_dim
    hidden = _integer("hidden_size", source.get("hidden_size"))
    heads = _integer("num_attention_heads", source.get("num_attention_heads"))
    if hidden and heads:
        return hidden // heads
    if rotary_dim is not None:
        return rotary_dim
    raise ConfigError(
        "expected head_dim, or hidden_size and num_attention_heads, got a config without them; "
        "pass head_dim, or load the config with AutoConfig so that its class fills in the default"
    )


def _trained_length(
    source: _Source, params: Mapping[str, Any], form: str, rope_type: str, max_position: int | None
) -> dict[str, Any]:
    """Return original_max_position_embeddings and the factor, each as the config's form defines them.

    transformers 4 reads the trained length of yarn and llama3 from rope_scaling only. It reads that of
    longrope from the config only, where it also overrides the factor. In transformers 5 the config's value
    wins over that of flat rope_parameters, and is ignored beside nested ones. An explicit factor wins there.
    """
    key = "original_max_position_embeddings"
    inner = _integer(key, params.get(key)) or None
    outer = _integer(key, source.get(key)) or None
    factor = _number("factor", params.get("factor"))

    if form == "nested":
        trained = inner or max_position
    elif form == "flat":
        trained = outer or inner or max_position
    elif rope_type == "longrope":
        scaling_known = factor is not None or params.get("attention_factor") is not None
        trained = outer or (max_position if scaling_known else inner or max_position)
        if outer:
            factor = None
    elif rope_type == "llama3":
        trained = inner or outer
    else:
        trained = inner or max_position

    derivable = rope_type == "longrope" or (rope_type == "yarn" and (inner or outer))
    if factor is None and derivable and trained and max_position:
        factor = max_position / trained
    elif factor is not None and not factor >= 1:
        raise ConfigError(f"expected factor >= 1, got {factor}; give the ratio of new to trained length")
    return {key: trained, "factor": factor}


def _number(name: str, value: Any) -> Any:
    """Return ``value`` as a float; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"expected {name} to be a number, got {value!r}; correct {name} in the config")
    return float(value)


def _integer(name: str, value: Any) -> int | None:
    """Return ``value`` as an int; None stays None."""
    number = _number(name, value)
    if number is None:
        return None
    if not (math.isfinite(number) and number.is_integer()):
        raise ConfigError(f"expected {name} to be an integer, got {value!r}; correct {name} in the config")
    return int(number)


def _numbers(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"expected {name} to be a list of numbers, got {value!r}; correct the config")
    return tuple(_number(name, entry) for entry in value)


def _describe(config: Any) -> str:
    return f"a dict with {sorted(map(str, config))}" if isinstance(config, Mapping) else type(config).__name__
