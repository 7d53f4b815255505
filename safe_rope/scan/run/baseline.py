"""A baseline: the findings that a project lives with for now, so that only new ones count.

A finding is known by its file, its rule and its code with white space collapsed, not by its line: it stays
known when code above it grows. As many findings are covered as were recorded.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from safe_rope._base.files import write_atomically
from safe_rope.errors import ConfigError
from safe_rope.scan.engine import Hit

DEFAULT_FILE = ".safe-rope-baseline.json"
_VERSION = 1

Key = tuple[str, str, str]


class Baseline:
    """The recorded findings; paths in it are relative to its own directory."""

    def __init__(self, file: str, known: Mapping[Key, int] | None = None) -> None:
        self._file = os.path.abspath(file)
        self._known = Counter(known)

    @classmethod
    def load(cls, file: str) -> Baseline:
        """Read a baseline.

        Raises:
            ConfigError: there is none, or it is not one that this version can read.
        """
        known: Counter[Key] = Counter()
        try:
            document = json.loads(Path(file).read_bytes())
            found = document["version"]
            for item in document["findings"] if found == _VERSION else ():
                known[str(item["path"]), str(item["rule"]), str(item["code"])] += int(item["count"])
        except FileNotFoundError:
            raise ConfigError(f"{file}: there is no such baseline; make it with --write-baseline") from None
        except OSError as error:
            raise ConfigError(f"{file}: baseline cannot be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError) as error:
            again = "make it again with --write-baseline"
            raise ConfigError(f"{file}: not a baseline ({error!r}); {again}") from error
        if found != _VERSION:
            raise ConfigError(f"{file}: baseline of version {found}, this safe-rope reads {_VERSION}")
        return cls(file, known)

    def new(self, hits: Iterable[Hit]) -> list[Hit]:
        """Return the hits of one file that are not recorded."""
        seen: Counter[Key] = Counter()
        fresh = []
        for hit in hits:
            key = self._key(hit)
            seen[key] += 1
            if seen[key] > self._known[key]:
                fresh.append(hit)
        return fresh

    def _key(self, hit: Hit) -> Key:
        path = os.path.relpath(os.path.abspath(hit.finding.path), os.path.dirname(self._file))
        return path.replace(os.sep, "/"), hit.finding.rule, hit.snippet

    def write(self, hits: Iterable[Hit]) -> int:
        """Record these hits instead of what the file held; return how many they are."""
        counts = Counter(self._key(hit) for hit in hits)
        findings = [
            {"path": path, "rule": rule, "code": code, "count": counts[path, rule, code]}
            for path, rule, code in sorted(counts)
        ]
        document = json.dumps({"version": _VERSION, "findings": findings}, indent=1) + "\n"
        write_atomically(self._file, document.encode())
        return counts.total()
