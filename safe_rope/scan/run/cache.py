"""Remembers results by content, so that a second scan only reads and hashes.

One SQLite file per version of the scanner, in the user's cache directory: it takes concurrent runs and needs
no clean-up. Whatever goes wrong with it, the scan goes on without.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safe_rope.scan.engine import FileResult, decode, encode

# About 25 MB; the oldest entries go first.
MAX_ENTRIES = 100_000
_SOURCES = Path(__file__).parents[1]


def directory() -> Path:
    """Return the user's cache directory for safe-rope."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore a relative one
        base = os.environ.get("LOCALAPPDATA", "") if sys.platform == "win32" else ""
    return Path(base) / "safe-rope" if base else Path.home() / ".cache" / "safe-rope"


def key(data: bytes, path: str) -> bytes:
    """Return what identifies a result: the content, and the path, which tells rules a script from a model."""
    digest = hashlib.blake2b(os.fsencode(path) + b"\0", digest_size=20)
    digest.update(data)
    return digest.digest()


@functools.cache
def version(sources: Path = _SOURCES) -> str:
    """Return what a result depends on besides its file: every source of the scanner, and Python's grammar.

    Raises:
        OSError: the sources cannot be read, so that nobody can tell whether they changed.
    """
    digest = hashlib.blake2b(f"{sys.version_info[:2]}".encode(), digest_size=8)
    files = sorted(sources.rglob("*.py"))
    if not files:
        raise FileNotFoundError(f"{sources} holds no source")
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.relative_to(sources).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


class Cache:
    """Results of earlier scans; `None` as file remembers nothing."""

    def __init__(self, file: Path | None) -> None:
        self._connection = None if file is None else _open(file)
        self.empty = self._ask("SELECT 1 FROM results LIMIT 1") is None

    def _ask(self, query: str, *values: bytes) -> tuple[Any, ...] | None:
        """Return the first row of an answer, if there is one."""
        try:
            row = None if self._connection is None else self._connection.execute(query, values).fetchone()
        except sqlite3.Error:
            row = self._connection = None
        return row

    def get(self, result_key: bytes, path: str) -> FileResult | None:
        """Return what is remembered under a key; None if that is nothing, or not what `encode` returns."""
        row = self._ask("SELECT data FROM results WHERE key = ?", result_key)
        with contextlib.suppress(ValueError, TypeError, LookupError):
            return None if row is None else decode(path, row[0])
        return None

    def put(self, results: Iterable[tuple[bytes, FileResult]]) -> None:
        """Remember results."""
        if self._connection is None:
            return
        rows = [(result_key, encode(result)) for result_key, result in results]
        with contextlib.suppress(sqlite3.Error), self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO results (key, data) VALUES (?, ?)", rows)
            self._connection.execute(
                "DELETE FROM results WHERE id <= (SELECT MAX(id) FROM results) - ?", (MAX_ENTRIES,)
            )

    def close(self) -> None:
        """Close the file; what was put is written."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def open_cache() -> Cache:
    """Return the cache of this user for these sources; one that remembers nothing where it cannot be."""
    try:
        return Cache(directory() / f"scan-{version()}.sqlite3")
    except (OSError, RuntimeError):  # no sources beside this one, as in a zip; no home directory
        return Cache(None)


def _open(file: Path) -> sqlite3.Connection | None:
    for _ in range(2):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(file, timeout=2)
            # A lost entry costs one analysis; waiting for the disk costs every scan.
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS results (id INTEGER PRIMARY KEY, key BLOB UNIQUE, data TEXT)"
            )
            return connection
        except (OSError, sqlite3.OperationalError):  # locked for long, no space, read-only
            return None
        except sqlite3.DatabaseError:  # not a database any more
            with contextlib.suppress(OSError):
                file.unlink()
    return None
