"""The rules of `safe-rope scan`, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safe_rope.scan.finding import Severity


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule's file says about itself."""

    id: str
    name: str
    severity: Severity
    summary: str
    explanation: str
    VALID: tuple[str, ...]
    INVALID: tuple[str, ...]


RULES: Mapping[str, Rule] = {}
RULES_VERSION = "0"
