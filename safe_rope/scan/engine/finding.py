"""What a scan reports: findings, and the byte edits that fix them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces the bytes ``start:end`` of the source as it was read."""

    start: int
    end: int
    replacement: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that belong together. Safe: same FP32 table bit for bit, and the right one under zero.Init."""

    edits: tuple[Edit, ...]
    safe: bool
    description: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One hazard. Lines and columns count from 1, columns in characters; the end is exclusive."""

    rule: str
    severity: Severity
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    fix: Fix | None = None


def apply_edits(source: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the source with every edit made; equal edits count once.

    Raises:
        ValueError: two different edits overlap.
    """
    pieces: list[bytes] = []
    position = 0
    for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < position:
            raise ValueError(f"edits overlap at byte {edit.start}; apply them in separate runs")
        pieces += [source[position : edit.start], edit.replacement.encode()]
        position = edit.end
    return b"".join([*pieces, source[position:]])
