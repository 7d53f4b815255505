"""The rules of `safe-rope scan`, one file each: docstring, message, severity, examples and check."""

from __future__ import annotations

from collections.abc import Mapping

from safe_rope.scan.rules import (
    sr001,
    sr002,
    sr003,
    sr004,
    sr005,
    sr006,
    sr007,
    sr008,
    sr009,
    sr010,
    sr011,
    sr012,
)  # fmt: skip
from safe_rope.scan.rules.rule import Rule

__all__ = ["RULES", "Rule"]

RULES: Mapping[str, Rule] = {
    module.RULE.id: module.RULE
    for module in (sr001, sr002, sr003, sr004, sr005, sr006, sr007, sr008, sr009, sr010, sr011, sr012)
}
