"""A baseline: the findings that a project lives with for now, so that only new ones count.

A finding is known by its file, its rule and its code with white space collapsed, not by its line: it stays
known when code above it grows. As many findings are covered as were recorded.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from safe_rope._base.files import write_atomically
from safe_rope.errors import ConfigError
from safe_rope.scan.engine.result import Hit

DEFAULT = ".safe-rope-baseline.json"
_VERSION = 1

Key = tuple[str, str, str]


class Baseline:
    """The recorded findings; paths in it are relative to its own directory."""

    def __init__(self, file: str, known: Counter[Key] | None = None) -> None:
        self._directory = os.path.dirname(os.path.abspath(file))
        self._known: Counter[Key] = known or Counter()

    def new(self, hits: Iterable[Hit]) -> list[Hit]:
        """Return the hits of one file that are not recorded."""
        if not self._known:
            return list(hits)
        seen: Counter[Key] = Counter()
        fresh = []
        for hit in hits:
            key = self._key(hit)
            seen[key] += 1
            if seen[key] > self._known[key]:
                fresh.append(hit)
        return fresh

    def _key(self, hit: Hit) -> Key:
        path = os.path.relpath(os.path.abspath(hit.finding.path), self._directory)
        return path.replace(os.sep, "/"), hit.finding.rule, hit.snippet

    def write(self, file: str, hits: Iterable[Hit]) -> int:
        """Record these hits instead of what the file held; return how many they are."""
        counts = Counter(self._key(hit) for hit in hits)
        findings = [
            {"path": path, "rule": rule, "code": code, "count": counts[path, rule, code]}
            for path, rule, code in sorted(counts)
        ]
        document = json.dumps({"version": _VERSION, "findings": findings}, indent=1) + "\n"
        write_atomically(file, document.encode())
        return counts.total()


def load(file: str) -> Baseline:
    """Read a baseline.

    Raises:
        ConfigError: there is none, or it is not one that this version can read.
    """
    try:
        document = json.loads(Path(file).read_bytes())
        if document["version"] != _VERSION:
            raise ConfigError(
                f"{file}: baseline of version {document['version']}, this safe-rope reads {_VERSION}"
            )
        known: Counter[Key] = Counter()
        for item in document["findings"]:
            known[str(item["path"]), str(item["rule"]), str(item["code"])] += int(item["count"])
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such baseline; make it with --write-baseline") from None
    except OSError as error:
        raise ConfigError(f"{file}: baseline cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{file}: not a baseline ({error!r}); make it again with --write-baseline"
        ) from error
    return Baseline(file, known)
