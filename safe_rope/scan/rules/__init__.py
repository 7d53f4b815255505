"""The rules of `safe-rope scan`, one file each: docstring, message, severity, examples and check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

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
from safe_rope.scan.rules._rule import Rule

RULES: Mapping[str, Rule] = {
    module.RULE.id: module.RULE
    for module in (sr001, sr002, sr003, sr004, sr005, sr006, sr007, sr008, sr009, sr010, sr011, sr012)
}


@cache
def _version() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for file in sorted([*folder.glob("*.py"), *folder.parent.glob("*.py")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def __getattr__(name: str) -> str:
    # Hashing the sources costs milliseconds that a run without a cache need not pay.
    if name == "RULES_VERSION":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
