"""What a rotary module says of itself: how it is called, which specs it holds, which buffers are tables.

A module is recognised by what it has (signatures, attributes, buffers), so one reading serves every release
of transformers. 4.36 has a per-layer ``forward(x, seq_len)`` with ``cos_cached``. Later releases have a
model-level ``forward(x, position_ids)``, with per-layer-type parameters in 5.x.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from safe_rope._base.functions import signature_of
from safe_rope.errors import UnsupportedModelError
from safe_rope.frequencies import RopeSpec
from safe_rope.registry import RopePatch

Convention = Literal["positions", "length"]

_INV_FREQ = re.compile(r"(^|_)inv_freq$")
_TRAINED = "original_max_position_embeddings"
_CACHE = re.compile(r"(^|_)(cos|sin)_cached$")


def calling_convention(cls: type) -> Convention | None:
    """Tell how ``cls.forward`` gets its positions, or None if it takes none.

    ``"positions"``: ``forward(x, position_ids, ...)`` returns cos and sin of shape [*position_ids.shape,
    dim].
    ``"length"``: ``forward(x, seq_len)`` returns the first seq_len rows of a table [length, dim].
    """
    try:
        names = tuple(signature_of(getattr(cls, "forward", None)).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if "position_ids" in names:
        return "positions"
    return "length" if "seq_len" in names else None


def position_buffers(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's own buffers and plain tensor attributes that hold position tables."""
    held = (name for name, value in vars(module).items() if issubclass(type(value), torch.Tensor))
    names = [*module._buffers.keys(), *held]
    return tuple(name for name in names if _INV_FREQ.search(name) or _CACHE.search(name))


def cached_length(module: nn.Module) -> int:
    """How many rows the tables have of a module that is called with a length."""
    length = getattr(module, "max_seq_len_cached", None)
    if length is None:  # DeepSeek's own code says so until the first forward
        cached = getattr(module, "cos_cached", None)
        length = cached.shape[-2] if isinstance(cached, torch.Tensor) and cached.dim() > 1 else 0
    return int(length)


def is_position_module(module: nn.Module) -> bool:
    """Whether the module itself (not a child of it) looks like a rotary position module."""
    return bool(position_buffers(module)) and calling_convention(type(module)) is not None


def layer_types(module: nn.Module) -> tuple[str | None, ...]:
    """The layer types that the module keeps separate parameters for; ``(None,)`` where there is one set."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, Mapping) and rope_type:  # ESM's is empty
        return tuple(rope_type)
    return (None,)


def read_spec(module: nn.Module, patch: RopePatch | None, layer_type: str | None = None) -> RopeSpec:
    """Read the `RopeSpec` that ``module`` was built for.

    Raises:
        ConfigError: the configuration contradicts itself.
        UnsupportedModelError: neither a config nor the usual attributes are there.
    """
    if patch is not None and patch.read_spec is not None:
        return patch.read_spec(module, layer_type)
    config = getattr(module, "config", None)
    if config is not None:
        spec = RopeSpec.from_config(config, layer_type, rotary_dim=_built_rotary_dim(module, layer_type))
        # Nemotron takes no notice of a scaling that its config has.
        return spec.unscaled() if getattr(module, "rope_type", None) == "default" else spec
    described = _describe_attributes(module)
    if described is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has neither a config nor the attributes dim and base, so its "
            "frequencies cannot be told; give its RopePatch a read_spec"
        )
    return RopeSpec.from_config(described, rotary_dim=described["head_dim"])


def divides_positions(module: nn.Module, spec: RopeSpec) -> bool:
    """Whether the module divides positions instead of inv_freq, as Llama's linear scaling did before 4.43."""
    return (
        spec.rope_type == "linear"
        and getattr(module, "rope_type", None) is None
        and not hasattr(module, "config")
    )


def shown_spec(module: nn.Module, spec: RopeSpec) -> RopeSpec:
    """The spec that the module's inv_freq is made from."""
    return spec.unscaled() if divides_positions(module, spec) else spec


def trained_length(module: nn.Module, layer_type: str | None, spec: RopeSpec) -> int:
    """Return up to which length longrope takes its short factors, as the module's config has it now.

    ``spec`` says it for a module without such a config. Dynamo traces this function.
    """
    known = spec.original_max_position_embeddings or spec.max_position_embeddings or 0
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        if layer_type is not None:
            rope = rope.get(layer_type)
        now = rope.get(_TRAINED) if isinstance(rope, dict) else None
    else:
        now = getattr(config, _TRAINED, None)
    return now if isinstance(now, int) and now > 0 else known


def _built_rotary_dim(module: nn.Module, layer_type: str | None) -> int | None:
    # Whatever happens to its values, a buffer keeps its length, and some classes ignore
    # partial_rotary_factor.
    built = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq", None)
    return 2 * built.numel() if isinstance(built, torch.Tensor) else None


def _describe_attributes(module: nn.Module) -> dict[str, Any] | None:
    """The v4 config that the attributes of an old rotary module stand for, or None."""
    rope_kwargs = getattr(module, "rope_kwargs", None) or {}  # transformers 4.43 to 4.47
    dim = getattr(module, "dim", None) or rope_kwargs.get("dim")
    base = getattr(module, "base", None) or rope_kwargs.get("base")
    if dim is None or base is None:
        return None
    length = getattr(module, "max_position_embeddings", None) or rope_kwargs.get("max_position_embeddings")
    described: dict[str, Any] = {
        "head_dim": int(dim),
        "rope_theta": float(base),
        "max_position_embeddings": length,
        "rope_scaling": None,
    }
    rope_type = _old_rope_type(module, rope_kwargs)
    if rope_type != "default":
        factor = getattr(module, "scaling_factor", None) or rope_kwargs.get("factor", 1.0)
        described["rope_scaling"] = {"type": rope_type, "factor": float(factor)}
    return described


def _old_rope_type(module: nn.Module, rope_kwargs: Mapping[str, Any]) -> str:
    rope_type = getattr(module, "rope_type", None) or rope_kwargs.get("rope_type")
    if isinstance(rope_type, str):
        return rope_type
    # Before 4.43 the type is told by the class alone; a subclass keeps its base's.
    for cls in type(module).__mro__:
        if "DynamicNTK" in cls.__name__:
            return "dynamic"
        if "LinearScaling" in cls.__name__:
            return "linear"
    return "default"
