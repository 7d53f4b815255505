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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from safe_rope._base.text import nearest
from safe_rope.errors import ConfigError

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
    parts = re.split(r"(\*\*/|/\*\*$|\*\*|\*|\?|\[!?[^\]]+\])", pattern)
    meaning = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = ""
    for part in parts:
        if part in meaning:
            made += meaning[part]
        elif re.fullmatch(r"\[!?[^\]]+\]", part):
            made += "[^" + part[2:] if part.startswith("[!") else part
        else:
            made += re.escape(part)
    return re.compile(("" if anchored else "(?:.*/)?") + made + "(?:/.*)?$", re.DOTALL)


def load(
    directory: str,
    known: Collection[str],
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> Settings:
    """Return what counts in a directory.

    Args:
        directory: where the search for a pyproject.toml starts, upward.
        known: the ids of all rules.
        select: of the command line; replaces `select` and `ignore` of the file.
        ignore: of the command line.
    Raises:
        ConfigError: an unknown rule or key, or a wrong type; the message names the nearest known.
    """
    chosen = check_rules(select, known, "--select")
    dropped = check_rules(ignore, known, "--ignore")
    found = _nearest(os.path.abspath(directory))
    if found is None:
        return Settings(os.path.abspath(directory), (chosen or frozenset(known)) - dropped)
    file, table = found
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{file}: [tool.safe-rope] has no key {key!r}; {_nearest_of(key, _KEYS)}")
    in_file = {
        key: check_rules(_strings(file, key, table.get(key, [])), known, f"{file}: {key}")
        for key in ("select", "ignore")
    }
    if chosen:
        rules = chosen - dropped
    elif "select" in table:
        rules = in_file["select"] - in_file["ignore"] - dropped
    else:
        rules = frozenset(known) - in_file["ignore"] - dropped
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, Mapping):
        raise ConfigError(f"{file}: per-file-ignores must be a table of pattern = [rules], got {per_file!r}")
    return Settings(
        os.path.dirname(file),
        rules,
        tuple(_strings(file, "exclude", table.get("exclude", []))),
        tuple(
            (pattern, check_rules(_strings(file, pattern, names), known, f"{file}: per-file-ignores"))
            for pattern, names in per_file.items()
        ),
    )


def check_rules(names: Iterable[str], known: Collection[str], where: str) -> frozenset[str]:
    """Return rule names as a set, in upper case.

    Raises:
        ConfigError: one is not the name of a rule.
    """
    rules = frozenset(name.strip().upper() for name in names)
    for rule in sorted(rules):
        if rule not in known:
            raise ConfigError(f"{where}: there is no rule {rule!r}; {_nearest_of(rule, known)}")
    return rules


def _nearest_of(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"


def _strings(file: str, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{file}: {key} must be a list of strings, got {value!r}")
    return value


def _nearest(directory: str) -> tuple[str, dict[str, Any]] | None:
    while True:
        file = os.path.join(directory, "pyproject.toml")
        if os.path.isfile(file):
            status = os.stat(file)
            table = _read(file, status.st_mtime_ns, status.st_size)
            if table is not None:
                return file, table
        above = os.path.dirname(directory)
        if above == directory:
            return None
        directory = above


@functools.lru_cache(maxsize=64)
def _read(file: str, modified: int, size: int) -> dict[str, Any] | None:
    # Time and size are part of the cache's key only.
    try:
        with open(file, "rb") as opened:
            data = opened.read()
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
