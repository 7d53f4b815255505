"""Keep rotary position embeddings exact through DeepSpeed ZeRO, dtype casts and device moves.

    with safe_rope.guard():
        model = AutoModelForCausalLM.from_pretrained(...)

What is here:

    guard(...)       a context manager for the lines that build or load a model
    protect(model)   the same for a model that exists already
    audit(model)     measure every position table; returns an AuditReport
    initialize(...)  deepspeed.initialize with torch.autocast checked and corrected

    tables           cos and sin of any position: RotaryTable
    rotation         q and k rotated in FP32: apply_rotary
    frequencies      what a config says about RoPE: RopeSpec
    registry         names for an architecture of your own: RopePatch, register
    integrations     callbacks for transformers' Trainer and for Lightning
    autocast         which parameters may travel in low precision
    constructors     the dtype that was asked for, under deepspeed.zero.Init
    scan             source in which positions can be rounded: scan

    SafeRopeError    the base of every error: ConfigError, DamagedTablesError, IncompatibleVersionError,
                     MissingDependencyError, PrecisionError, UnsupportedModelError
    PrecisionWarning what is not protected

Importing this package imports neither torch nor transformers nor deepspeed; the names below are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from safe_rope._base.version import VERSION
from safe_rope.errors import (
    ConfigError,
    DamagedTablesError,
    IncompatibleVersionError,
    MissingDependencyError,
    PrecisionError,
    PrecisionWarning,
    SafeRopeError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from safe_rope._audit.model import audit as audit
    from safe_rope._audit.report import AuditReport as AuditReport
    from safe_rope._protection import guard as guard
    from safe_rope._protection import protect as protect
    from safe_rope.autocast.engine import initialize as initialize

__version__ = VERSION

__all__ = [
    "AuditReport",
    "ConfigError",
    "DamagedTablesError",
    "IncompatibleVersionError",
    "MissingDependencyError",
    "PrecisionError",
    "PrecisionWarning",
    "SafeRopeError",
    "UnsupportedModelError",
    "audit",
    "guard",
    "initialize",
    "protect",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())

_LAZY = {
    "guard": "safe_rope._protection",
    "protect": "safe_rope._protection",
    "audit": "safe_rope._audit.model",
    "AuditReport": "safe_rope._audit.report",
    "initialize": "safe_rope.autocast.engine",
}
_SUBMODULES = frozenset(
    {
        "autocast",
        "constructors",
        "frequencies",
        "integrations",
        "registry",
        "rotation",
        "scan",
        "tables",
    }
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        globals()[name] = value = getattr(load(_LAZY[name], name), name)
        return value
    if name in _SUBMODULES:
        return load(f"{__name__}.{name}", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(module: str, name: str) -> Any:
    """Import the module of ours that gives this name; say what to install where a package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == __name__:
            raise
        raise MissingDependencyError(
            f"safe_rope.{name} needs {error.name}, which is not installed; "
            'install the training extra: pip install "safe-rope[train]"'
        ) from error


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))]


if os.environ.get("SAFE_ROPE"):
    # Asked for by the environment: guard this process from its import of torch on.
    from safe_rope.integrations import autostart

    autostart.arm()
