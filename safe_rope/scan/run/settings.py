"""`[tool.safe-rope]` of the nearest pyproject.toml that has it, and what the command line says instead.

    [tool.safe-rope]
    select = ["SR001", "SR003"]                       # default: every rule
    ignore = ["SR012"]
    exclude = ["vendor", "docs/**/*.py"]
    per-file-ignores = { "tests/**" = ["SR001"] }

Patterns are relative to the directory of the pyproject.toml; one without a slash matches any part of a path.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_rope._base.text import nearest
from safe_rope.errors import ConfigError
from safe_rope.scan.rules import RULES

_KEYS = ("select", "ignore", "per-file-ignores", "exclude")


@dataclass(frozen=True, slots=True)
class Settings:
    """Which rules count for which files."""

    directory: str
    rules: frozenset[str]
    exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, frozenset[str]], ...] = ()

    def excludes(self, path: str) -> bool:
        """Return whether a pattern of `exclude` matches the path or a directory above it."""
        return bool(self.exclude) and self._matches(path, self.exclude)

    def rules_for(self, path: str) -> frozenset[str]:
        """Return the rules that count for one file."""
        rules = self.rules
        for pattern, ignored in self.per_file_ignores:
            if self._matches(path, (pattern,)):
                rules -= ignored
        return rules

    def _matches(self, path: str, patterns: Iterable[str]) -> bool:
        relative = os.path.relpath(os.path.abspath(path), self.directory).replace(os.sep, "/")
        return any(_compile(pattern).match(relative) for pattern in patterns)


@functools.lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    anchored = "/" in pattern.rstrip("/")
    pattern = pattern.removeprefix("./").strip("/")
    meaning = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = ""
    for part in re.split(r"(\*\*/|/\*\*$|\*\*|\*|\?|\[!?[^\]]+\])", pattern):
        if re.fullmatch(r"\[!?[^\]]+\]", part):
            made += "[^" + part[2:] if part.startswith("[!") else part
        else:
            made += meaning.get(part) or re.escape(part)
    return re.compile(("" if anchored else "(?:.*/)?") + made + "(?:/.*)?$", re.DOTALL)


def load_settings(directory: str, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> Settings:
    """Return what counts in a directory.

    Args:
        directory: where the search for a pyproject.toml starts, upward.
        select: of the command line; replaces `select` and `ignore` of the file.
        ignore: of the command line.
    Raises:
        ConfigError: an unknown rule or key, or a wrong type; the message names the nearest known.
    """
    chosen = check_rules(select, "--select")
    dropped = check_rules(ignore, "--ignore")
    file, table = _nearest(os.path.abspath(directory))
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{file}: [tool.safe-rope] has no key {key!r}; {_nearest_of(key, _KEYS)}")
    selected, ignored = (
        check_rules(_strings(file, key, table.get(key, default)), f"{file}: {key}")
        for key, default in (("select", list(RULES)), ("ignore", []))
    )
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, Mapping):
        raise ConfigError(f"{file}: per-file-ignores must be a table of pattern = [rules], got {per_file!r}")
    return Settings(
        os.path.dirname(file),
        (chosen or selected - ignored) - dropped,
        tuple(_strings(file, "exclude", table.get("exclude", []))),
        tuple(
            (pattern, check_rules(_strings(file, pattern, names), f"{file}: per-file-ignores"))
            for pattern, names in per_file.items()
        ),
    )


def check_rules(names: Iterable[str], where: str) -> frozenset[str]:
    """Return rule names as a set, in upper case.

    Raises:
        ConfigError: one is not the name of a rule.
    """
    rules = frozenset(name.strip().upper() for name in names)
    for rule in sorted(rules - RULES.keys()):
        raise ConfigError(f"{where}: there is no rule {rule!r}; {_nearest_of(rule, RULES)}")
    return rules


def _nearest_of(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"


def _strings(file: str, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{file}: {key} must be a list of strings, got {value!r}")
    return value


def _nearest(directory: str) -> tuple[str, dict[str, Any]]:
    """Return the nearest pyproject.toml with a table of ours, and that; none is as an empty one here."""
    for above in (Path(directory), *Path(directory).parents):
        file = str(above / "pyproject.toml")
        if os.path.isfile(file):
            status = os.stat(file)
            table = _read(file, status.st_mtime_ns, status.st_size)
            if table is not None:
                return file, table
    return os.path.join(directory, "pyproject.toml"), {}


@functools.lru_cache(maxsize=64)
def _read(file: str, modified: int, size: int) -> dict[str, Any] | None:
    # Time and size are part of the cache's key only.
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if b"safe-rope" not in data:
        return None  # spares the import of a TOML reader
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ConfigError(f"{file}: Python 3.10 needs tomli to read it: pip install tomli") from None
    try:
        document = toml.loads(data.decode())
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    table = document.get("tool", {}).get("safe-rope")
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{file}: [tool.safe-rope] must be a table, got {table!r}")
    return table
