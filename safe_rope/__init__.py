"""Position embeddings that stay what a model's authors meant, whatever casts and partitions the model.

    with safe_rope.guard():
        model = AutoModelForCausalLM.from_pretrained(...)

Importing this package imports neither torch nor transformers nor deepspeed; the names below are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types
from typing import TYPE_CHECKING, Any

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
    from safe_rope.audit import AuditReport as AuditReport
    from safe_rope.audit import audit as audit
    from safe_rope.autocast.engine import initialize as initialize
    from safe_rope.guard import guard as guard
    from safe_rope.guard import protect as protect

__version__ = "0.1.0"

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
    "guard": "safe_rope.guard",
    "protect": "safe_rope.guard",
    "audit": "safe_rope.audit",
    "AuditReport": "safe_rope.audit",
    "initialize": "safe_rope.autocast.engine",
}
_SUBMODULES = frozenset(
    {
        "autocast",
        "constructors",
        "frequencies",
        "integrations",
        "registry",
        "rewrite",
        "rotation",
        "tables",
    }
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        globals()[name] = value = getattr(_import(_LAZY[name], name), name)
        return value
    if name in _SUBMODULES:
        return _import(f"{__name__}.{name}", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == __name__:
            raise
        raise MissingDependencyError(
            f"safe_rope.{name} needs {error.name}, which is not installed; "
            'install the training extra: pip install "safe-rope[train]"'
        ) from error


class _Package(types.ModuleType):
    """Keeps ``safe_rope.guard`` the function, which importing the submodule of that name would replace."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


if os.environ.get("SAFE_ROPE"):
    # Asked for by the environment: guard this process from its import of torch on.
    from safe_rope.integrations import autostart

    autostart.arm()
