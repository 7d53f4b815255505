"""Finds source whose positions, distances and frequency tables a lower dtype can round: `safe-rope scan`.

    from safe_rope.scan import scan

    for finding in scan(["src"]).findings:
        print(finding.path, finding.line, finding.rule, finding.message)

Nothing that is scanned is imported or run, and the standard library suffices: torch is never imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from safe_rope.scan.engine import Diagnostic, FileResult, Hit, UnreadableError, limited
from safe_rope.scan.fixing import diff, fix_source
from safe_rope.scan.formats import FORMATS, printable, table
from safe_rope.scan.rules import RULES, Rule
from safe_rope.scan.run import session
from safe_rope.scan.run.baseline import DEFAULT_FILE, Baseline
from safe_rope.scan.run.cache import Cache, open_cache
from safe_rope.scan.run.one_file import scan_source
from safe_rope.scan.run.runner import scan_files
from safe_rope.scan.run.selection import Selection
from safe_rope.scan.run.session import Scanned
from safe_rope.scan.run.settings import LISTS, Settings, check_rules, load_settings

# The names beside Scanned, Settings and scan are the command's.
__all__ = [
    "DEFAULT_FILE", "FORMATS", "LISTS", "RULES", "Baseline", "Cache", "Diagnostic", "FileResult", "Hit",
    "Rule", "Scanned", "Selection", "Settings", "UnreadableError", "check_rules", "diff", "fix_source",
    "limited", "load_settings", "open_cache", "printable", "scan", "scan_files", "scan_source", "session",
    "table",
]  # fmt: skip


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
        TypeError: ``paths`` is one path.
    """
    if isinstance(paths, str | bytes | os.PathLike):
        raise TypeError(f"paths must be a list of paths, got {paths!r}; pass [{paths!r}]")
    return session.scan_paths([os.fspath(path) for path in paths], settings, jobs=jobs)
