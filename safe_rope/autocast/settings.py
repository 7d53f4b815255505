"""The part of a DeepSpeed config that decides about autocast, read once and checked."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from safe_rope.errors import ConfigError

SECTION = "torch_autocast"
DTYPES: dict[Any, torch.dtype] = {
    name: dtype
    for dtype, names in {
        torch.bfloat16: (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16"),
        torch.float16: (torch.float16, "torch.float16", "fp16", "float16", "half"),
    }.items()
    for name in names
}
COMMUNICATION_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# What DeepSpeed takes where the config says nothing; both are numbers of elements.
REDUCE_BUCKET_SIZE = 500_000_000


@dataclass(frozen=True)
class AutocastSettings:
    """What ``torch_autocast`` and the sections around it ask for.

    ``safe_modules`` is ``"auto"`` (derive them) or the qualified names of module classes;
    ``reduce_dtype`` is FP32 where ``communication_data_type`` asks for it, else ``dtype``, and holds for
    the parameters that are safe; ``reduce_bucket_size`` is in elements.
    """

    dtype: torch.dtype
    safe_modules: Literal["auto"] | tuple[str, ...]
    stage: int
    accumulation_steps: int
    reduce_dtype: torch.dtype
    reduce_bucket_size: int


def find_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the one config that was given, as ``deepspeed.initialize`` looks for it; None where none was."""
    if config is None:
        config = config_params
    if config is None:
        config = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    return config


def read_config(config: Any) -> dict[str, Any]:
    """Return a DeepSpeed config as a dict.

    Args:
        config: a dict, the path of a JSON or HJSON file, or either as URL-safe base64.

    Raises:
        ConfigError: it is none of these, or names a key twice.

    """
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, os.PathLike)):
        path = os.fspath(config)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return _parse(file.read(), f"the DeepSpeed config {path}")
        try:
            text = base64.urlsafe_b64decode(path).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            text = ""
        if text:
            return _parse(text, "the base64 DeepSpeed config")
    raise ConfigError(
        f"expected a DeepSpeed config as a dict, the path of a file that exists, or base64; got {config!r}"
    )


def _parse(text: str, what: str) -> dict[str, Any]:
    try:
        import hjson  # type: ignore[import-untyped]  # DeepSpeed requires it, and writes its own configs in it

        parsed = hjson.loads(text, object_pairs_hook=_unique)
    except ImportError:
        parsed = json.loads(text, object_pairs_hook=_unique)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{what} must hold an object, got {type(parsed).__name__}")
    return parsed


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if twice:
        raise ConfigError(f"the DeepSpeed config names {', '.join(twice)} twice; keep one of them")
    return dict(pairs)


def is_enabled(config: Mapping[str, Any], section: str) -> bool:
    """Whether ``section`` is there and says ``"enabled": true``."""
    value = config.get(section)
    return isinstance(value, Mapping) and bool(value.get("enabled", False))
