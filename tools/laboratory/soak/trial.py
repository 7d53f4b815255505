"""Count what was tried and what failed."""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections.abc import Iterator
from typing import Any

KEPT = 20
"""Failures of a kind that are kept; all are counted."""


class Trial:
    """The tries of one part, each of a named kind.

    Attributes:
        random: what the part draws from.
        scale: what its usual counts are multiplied by.
        measured: other numbers that it wants kept, by name.
    """

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.scale = scale
        self.kinds: dict[str, dict[str, Any]] = {}
        self.measured: dict[str, float] = {}

    def count(self, usual: int) -> int:
        """Return how often to try what is usually tried so often."""
        return max(1, round(usual * self.scale))

    @contextlib.contextmanager
    def of(self, kind: str, what: object = "") -> Iterator[None]:
        """Count one try; an exception inside is a failure, kept with ``what``."""
        entry = self.kinds.setdefault(kind, {"tries": 0, "failed": 0, "failures": []})
        entry["tries"] += 1
        try:
            yield
        except Exception as error:
            entry["failed"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).strip().partition("\n")[0]
            line = f"{what}: {type(error).__name__}: {said[:300]} ({where.name}:{where.lineno})"
            print(kind, line, file=sys.stderr, flush=True)
            if len(entry["failures"]) < KEPT:
                entry["failures"].append(line)

    def passed(self, kind: str, tries: int) -> None:
        """Count tries that did not fail."""
        self.kinds.setdefault(kind, {"tries": 0, "failed": 0, "failures": []})["tries"] += tries

    def result(self) -> dict[str, Any]:
        """Return what was counted, as JSON."""
        return {"kinds": self.kinds, "measured": self.measured}
