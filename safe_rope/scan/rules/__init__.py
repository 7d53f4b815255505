"""The rules of `safe-rope scan`, one file each: docstring, message, severity, examples and check."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from safe_rope.scan.rules.rule import Rule

__all__ = ["RULES", "Rule"]

RULES: Mapping[str, Rule] = {
    f"SR{number:03}": import_module(f"{__name__}.sr{number:03}").RULE for number in range(1, 14)
}
