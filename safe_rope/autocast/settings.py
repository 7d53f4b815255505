"""The part of a DeepSpeed config that decides about autocast, read once and checked."""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from safe_rope.errors import ConfigError

SECTION = "torch_autocast"
_IN_ARGS = ("deepspeed_config", "deepscale_config")


@dataclass(frozen=True)
class AutocastSettings:
    """What ``torch_autocast`` and the sections around it ask for.

    ``safe_modules`` is ``"auto"`` (derive them) or the classes of modules whose parameters are meant;
    ``reduce_dtype`` is what ``communication_data_type`` asks for, None where it says nothing, and holds for
    the parameters that are safe or low; ``reduce_bucket_size`` is in elements.
    """

    dtype: torch.dtype
    safe_modules: Literal["auto"] | tuple[type[nn.Module], ...]
    stage: int
    accumulation_steps: int
    reduce_dtype: torch.dtype | None
    reduce_bucket_size: int


def find_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the one config that was given, as ``deepspeed.initialize`` looks for it; None where none was."""
    if config is None:
        config = config_params
    if config is None:
        config = next(filter(None, (getattr(args, name, None) for name in _IN_ARGS)), None)
    return config


def without_config(args: Any) -> Any:
    """Return ``args`` without the config that they name; the object itself stays as it is."""
    args = copy.copy(args)
    for name in _IN_ARGS:
        if getattr(args, name, None) is not None:
            setattr(args, name, None)
    return args


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
        text = ""
        with contextlib.suppress(ValueError):
            text = base64.urlsafe_b64decode(path).decode("utf-8")
        if text:
            return _parse(text, "the base64 DeepSpeed config")
    raise ConfigError(
        f"expected a DeepSpeed config as a dict, the path of a file that exists, or base64; got {config!r}"
    )


def _parse(text: str, what: str) -> dict[str, Any]:
    hjson: Any = importlib.import_module("hjson")  # DeepSpeed requires it, and reads its configs with it
    try:
        parsed = hjson.loads(text, object_pairs_hook=_unique)
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
