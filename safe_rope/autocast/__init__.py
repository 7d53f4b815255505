"""Mixed precision by torch.autocast on DeepSpeed's ZeRO, with the gradients that FP32 communication gives.

``initialize`` takes what ``deepspeed.initialize`` takes and returns what it returns. Importing this package
imports neither torch nor deepspeed; a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_rope.autocast._traffic import traffic
    from safe_rope.autocast.engine import full_precision, in_place_of_deepspeeds, initialize
    from safe_rope.autocast.safety import ParameterSafety, SafetyReport, derive_safe_parameters

_HOMES = {
    **dict.fromkeys(("full_precision", "in_place_of_deepspeeds", "initialize"), "engine"),
    "traffic": "_traffic",
}  # all others: safety

__all__ = [
    "ParameterSafety",
    "SafetyReport",
    "derive_safe_parameters",
    "full_precision",
    "in_place_of_deepspeeds",
    "initialize",
    "traffic",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'safety')}")
        globals()[name] = value = getattr(home, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
