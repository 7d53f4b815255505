"""Which parameters may be cast before they travel, so that the forward stays the same to the bit."""

from __future__ import annotations

from safe_rope.autocast.safety.choose import choose_parameters
from safe_rope.autocast.safety.derive import derive_safe_parameters
from safe_rope.autocast.safety.parameters import full_shape, held_by
from safe_rope.autocast.safety.ranks import agreement
from safe_rope.autocast.safety.report import ParameterSafety, SafetyReport

__all__ = [
    "ParameterSafety",
    "SafetyReport",
    "agreement",
    "choose_parameters",
    "derive_safe_parameters",
    "full_shape",
    "held_by",
]
