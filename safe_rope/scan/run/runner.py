"""Runs the analysis over many files: cache first, then one process or several."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from safe_rope.scan.engine.reading import UnreadableError, read
from safe_rope.scan.engine.result import Diagnostic, FileResult
from safe_rope.scan.run.cache import Cache, key

if TYPE_CHECKING:
    from concurrent.futures import Executor

# A worker process costs about as much as this many files.
FILES_PER_WORKER = 50
_CHUNK = 16
_KILLED = "the process that analyzed it was killed; it is not scanned"

# The result of one file and its key; None for a file that could not be read.
Keyed = tuple[bytes | None, FileResult]


class Progress:
    """A line on a terminal's stderr for whatever takes longer than two seconds."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total = total
        self._shown = False
        self._next = time.monotonic() + 2 if not quiet and sys.stderr.isatty() else float("inf")

    def at(self, done: int) -> None:
        """Show that so many files are done."""
        now = time.monotonic()
        if now >= self._next:
            sys.stderr.write(f"\rscanned {done:,} of {self._total:,} files\x1b[K")
            sys.stderr.flush()
            self._shown, self._next = True, now + 0.1

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def scan_files(
    paths: Sequence[str], cache: Cache, *, jobs: int | None = None, quiet: bool = False
) -> dict[str, FileResult]:
    """Return the result of every file, in the order of the paths.

    Args:
        paths: the files, each once.
        cache: is asked first, and told what is new.
        quiet: show no progress.
        jobs: how many processes; by default as many as there are cores and work for.
    """
    found: dict[str, FileResult] = {}
    keys: list[tuple[bytes, str]] = []
    for path in paths if not cache.empty else ():
        try:
            keys.append((key(read(path), path), path))
        except UnreadableError as error:
            found[path] = _unreadable(path, error)
    found.update(cache.get(keys))
    missing = [path for path in paths if path not in found]
    if missing:
        progress = Progress(len(missing), quiet=quiet)
        fresh: list[tuple[bytes, FileResult]] = []
        try:
            for known, result in _analyze(missing, jobs or _jobs(len(missing)), progress):
                found[result.path] = result
                if known is not None:
                    fresh.append((known, result))
        finally:
            progress.clear()
            cache.put(fresh)
    return {path: found[path] for path in paths}


def scan_file(path: str) -> Keyed:
    """Return one file's key and result; never raises for what the file is."""
    from safe_rope.scan.run.one_file import scan_source  # the warm cache does without

    try:
        data = read(path)
    except UnreadableError as error:
        return None, _unreadable(path, error)
    return key(data, path), scan_source(data, path)


def _unreadable(path: str, error: UnreadableError) -> FileResult:
    return FileResult(path, errors=(Diagnostic(path, 0, 0, str(error)),))


def _jobs(files: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, files // FILES_PER_WORKER))


def _analyze(paths: list[str], jobs: int, progress: Progress) -> Iterator[Keyed]:
    if jobs <= 1:
        for done, path in enumerate(paths):
            progress.at(done)
            yield scan_file(path)
        return
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    done = 0
    lost: list[str] = []
    for chunk, results in _in_pool(chunks, jobs):
        done += len(chunk)
        progress.at(done)
        if results is None:
            lost += chunk
        else:
            yield from results
    # A file that kills its process took others with it: each one now gets a process of its own.
    for path in lost:
        for _, results in _in_pool([[path]], 1):
            yield from results or [(None, FileResult(path, errors=(Diagnostic(path, 0, 0, _KILLED),)))]


def _in_pool(chunks: list[list[str]], jobs: int) -> Iterator[tuple[list[str], list[Keyed] | None]]:
    """Yield each chunk with its results, None if the process that had it died."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    with ProcessPoolExecutor(max_workers=min(jobs, len(chunks))) as pool:
        futures = {pool.submit(scan_chunk, chunk): chunk for chunk in chunks}
        try:
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except BrokenProcessPool:
                    yield futures[future], None
        except BaseException:
            _cancel(pool)
            raise


def _cancel(pool: Executor) -> None:
    pool.shutdown(wait=False, cancel_futures=True)


def scan_chunk(paths: list[str], scan: Callable[[str], Keyed] = scan_file) -> list[Keyed]:
    """Return the results of some files: the work of one process."""
    return [scan(path) for path in paths]
