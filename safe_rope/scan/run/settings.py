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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_rope._base.text import nearest
from safe_rope.errors import ConfigError
from safe_rope.scan.rules import RULES

_PATTERNS = ("exclude", "extend-exclude")
# The lists that both pyproject.toml and the command line take, and what they are to the command's reader.
LISTS = {
    "select": "Report only these rules: names, prefixes of names, or ALL.",
    "extend-select": "Report these rules too.",
    "ignore": "Do not report these rules.",
    "fixable": "Fix only these rules.",
    "unfixable": "Do not fix these rules.",
    "exclude": "Scan no file that a pattern matches, instead of those of the settings.",
    "extend-exclude": "Scan no file that a pattern matches, beside those of the settings.",
}
_KEYS = (*LISTS, "per-file-ignores", "respect-gitignore")
_ALL = frozenset(RULES)


@dataclass(frozen=True, slots=True)
class Settings:
    """Which rules count for which files, and which of them are fixed."""

    directory: str
    rules: frozenset[str] = _ALL
    exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, frozenset[str]], ...] = ()
    fixable: frozenset[str] = _ALL
    respect_gitignore: bool = True

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
        return any(compiled(pattern).match(relative) for pattern in patterns)

    def __str__(self) -> str:
        listed = {
            "directory": self.directory,
            "select": sorted(self.rules),
            "fixable": sorted(self.fixable),
            "exclude": list(self.exclude),
            "per-file-ignores": {pattern: sorted(rules) for pattern, rules in self.per_file_ignores},
            "respect-gitignore": self.respect_gitignore,
        }
        return "".join(f"{key} = {value!r}\n" for key, value in listed.items())


@functools.lru_cache(maxsize=256)
def compiled(pattern: str, *, below: bool = True) -> re.Pattern[str]:
    """Return what a pattern with `*`, `**`, `?` and `[…]` means, relative to its directory.

    Args:
        pattern: without a slash but at its end, it matches at any depth.
        below: it also matches whatever is in a directory that it matches.
    """
    anchored = "/" in pattern.rstrip("/")
    pattern = pattern.removeprefix("./").strip("/")
    meaning = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = ""
    for part in re.split(r"(\*\*/|/\*\*$|\*\*|\*|\?|\[!?[^\]]+\])", pattern):
        if re.fullmatch(r"\[!?[^\]]+\]", part):
            made += "[^" + part[2:] if part.startswith("[!") else part
        else:
            made += meaning.get(part) or re.escape(part)
    return re.compile(("" if anchored else "(?:.*/)?") + made + ("(?:/.*)?$" if below else "$"), re.DOTALL)


def load_settings(
    directory: str,
    given: Mapping[str, Sequence[str]] | None = None,
    *,
    config: str | None = None,
    isolated: bool = False,
) -> Settings:
    """Return what counts in a directory.

    Args:
        directory: where the search for a pyproject.toml starts, upward.
        given: what the command line says, by the keys of `LISTS`. `select` replaces `select` and `ignore` of
            the file, `fixable` and `exclude` replace theirs, everything else adds; patterns are relative to
            the current directory.
        config: the file to read instead of the nearest pyproject.toml.
        isolated: read none.
    Raises:
        ConfigError: an unknown rule or key, or a wrong type; the message names the nearest known.
    """
    given = {key: values for key, values in (given or {}).items() if values}
    directory = os.path.abspath(directory)
    if config is not None and not os.path.isfile(config):
        raise ConfigError(f"{config}: there is no such file; --config takes a pyproject.toml")
    file, table = (
        (os.path.join(directory, "pyproject.toml"), None) if isolated
        else _nearest(directory) if config is None
        else (os.path.abspath(config), _table(config, named=True))
    )  # fmt: skip
    table = dict(table or {})
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{file}: [tool.safe-rope] has no key {key!r}; {_nearest_of(key, _KEYS)}")
    lists = {key: _strings(file, key, table.get(key, [])) for key in LISTS}
    for key, names in lists.items():
        if key not in _PATTERNS:
            check_rules(names, f"{file}: {key}")
    if "select" in given:
        lists["ignore"] = []
    for key, values in given.items():
        if key in _PATTERNS:
            values = [
                os.path.relpath(value, os.path.dirname(file)) if "/" in value else value for value in values
            ]
        lists[key] = [*values] if key in ("select", "fixable", "exclude") else [*lists[key], *values]
    selected = lists["select"] if "select" in (*table, *given) else ["ALL"]
    per_file, respect = table.get("per-file-ignores", {}), table.get("respect-gitignore", True)
    if not isinstance(per_file, Mapping):
        raise ConfigError(f"{file}: per-file-ignores must be a table of pattern = [rules], got {per_file!r}")
    if not isinstance(respect, bool):
        raise ConfigError(f"{file}: respect-gitignore must be true or false, got {respect!r}")
    return Settings(
        os.path.dirname(file),
        chosen([*selected, *lists["extend-select"]], lists["ignore"]),
        (*lists["exclude"], *lists["extend-exclude"]),
        tuple(
            (pattern, check_rules(_strings(file, pattern, names), f"{file}: per-file-ignores"))
            for pattern, names in per_file.items()
        ),
        chosen(lists["fixable"] if "fixable" in (*table, *given) else ["ALL"], lists["unfixable"]),
        respect,
    )


def chosen(selected: Iterable[str], ignored: Iterable[str]) -> frozenset[str]:
    """Return the rules that the longest of the names and prefixes that mean them selects."""
    yes, no = ([_prefix(name) for name in names] for names in (selected, ignored))

    def longest(rule: str, prefixes: list[str]) -> int:
        return max((len(prefix) for prefix in prefixes if rule.startswith(prefix)), default=-1)

    return frozenset(rule for rule in RULES if longest(rule, yes) > longest(rule, no))


def _prefix(name: str) -> str:
    name = name.strip().upper()
    return "" if name == "ALL" else name


def check_rules(names: Iterable[str], where: str) -> frozenset[str]:
    """Return the rules that names, prefixes of names, or ALL, in any case, mean.

    Raises:
        ConfigError: one means no rule.
    """
    names = list(names)
    for name in names:
        if not chosen([name], []) or not name.strip():
            rule = name.strip().upper()
            raise ConfigError(f"{where}: there is no rule {rule!r}; {_nearest_of(rule, RULES)}")
    return chosen(names, [])


def _nearest_of(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"


def _strings(file: str, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{file}: {key} must be a list of strings, got {value!r}")
    return value


def _nearest(directory: str) -> tuple[str, dict[str, Any] | None]:
    """Return the nearest pyproject.toml with a table of ours, and that; none is as an empty one here."""
    for above in (Path(directory), *Path(directory).parents):
        file = str(above / "pyproject.toml")
        if (table := _table(file)) is not None:
            return file, table
    return os.path.join(directory, "pyproject.toml"), None


def _table(file: str, *, named: bool = False) -> dict[str, Any] | None:
    if not os.path.isfile(file):
        return None
    status = os.stat(file)
    return _read(file, named, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _read(file: str, named: bool, modified: int, size: int) -> dict[str, Any] | None:
    # Time and size are part of the cache's key only.
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if b"safe-rope" not in data and not named:
        return None  # spares the import of a TOML reader; a broken one of another tool is not ours to refuse
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ConfigError(f"{file}: Python 3.10 needs tomli to read it: pip install tomli") from None
    try:
        document = toml.loads(data.decode())
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    tools = document.get("tool", {})
    if not isinstance(tools, dict):
        raise ConfigError(f"{file}: [tool] must be a table, got {tools!r}")
    table = tools.get("safe-rope")
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{file}: [tool.safe-rope] must be a table, got {table!r}")
    return table
