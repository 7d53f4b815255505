"""Finds source whose positions, distances and frequency tables a lower dtype can round: `safe-rope scan`.

    from safe_rope.scan import scan

    for finding in scan(["src"]).findings:
        print(finding.path, finding.line, finding.rule, finding.message)

Nothing that is scanned is imported or run, and the standard library suffices: torch is never imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_rope.scan.run.session import Scanned as Scanned
    from safe_rope.scan.run.settings import Settings as Settings

__all__ = ["Scanned", "Settings", "scan"]


def scan(
    paths: Iterable[str | os.PathLike[str]], settings: Settings | None = None, *, jobs: int | None = 1
) -> Scanned:
    """Return what is found in files and below directories, as the command does.

    Results are remembered by content, so that a second scan analyzes only what changed. Findings that a
    comment silences are left out.

    Args:
        paths: Python files, notebooks and directories.
        settings: which rules count for which files; by default what the nearest pyproject.toml says.
        jobs: how many processes; None for as many as there are cores and work for.

    Raises:
        ConfigError: a pyproject.toml holds settings that are wrong.
    """
    from safe_rope.scan.run.session import scan_paths

    return scan_paths([os.fspath(path) for path in paths], settings, jobs=jobs)


def __getattr__(name: str) -> Any:
    # The command imports this package for every run, and a warm one takes a few hundredths of a second.
    if name == "Scanned":
        from safe_rope.scan.run.session import Scanned

        return Scanned
    if name == "Settings":
        from safe_rope.scan.run.settings import Settings

        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
