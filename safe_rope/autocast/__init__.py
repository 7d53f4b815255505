"""Mixed precision by torch.autocast on DeepSpeed's ZeRO, with the gradients that FP32 communication gives.

``initialize`` takes what ``deepspeed.initialize`` takes and returns what it returns. Importing this package
imports neither torch nor deepspeed; a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_rope.autocast.engine import full_precision as full_precision
    from safe_rope.autocast.engine import initialize as initialize
    from safe_rope.autocast.safety import ParameterSafety as ParameterSafety
    from safe_rope.autocast.safety import SafetyReport as SafetyReport
    from safe_rope.autocast.safety import derive_safe_parameters as derive_safe_parameters
    from safe_rope.autocast.traffic import traffic as traffic

__all__ = [
    "ParameterSafety",
    "SafetyReport",
    "derive_safe_parameters",
    "full_precision",
    "initialize",
    "traffic",
]

_LAZY = {
    "full_precision": "safe_rope.autocast.engine",
    "initialize": "safe_rope.autocast.engine",
    "derive_safe_parameters": "safe_rope.autocast.safety",
    "ParameterSafety": "safe_rope.autocast.safety",
    "SafetyReport": "safe_rope.autocast.safety",
    "traffic": "safe_rope.autocast.traffic",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        globals()[name] = value = getattr(importlib.import_module(_LAZY[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(types.ModuleType):
    """Keeps ``traffic`` the context manager, which importing the submodule of that name would replace."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
