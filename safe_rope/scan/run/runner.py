"""Runs the analysis over many files: cache first, then one process or several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

from safe_rope.scan.engine import Diagnostic, FileResult, UnreadableError, read
from safe_rope.scan.run.cache import Cache, key
from safe_rope.scan.run.one_file import scan_source

# A worker process costs about as much as this many files.
FILES_PER_WORKER = 50
_CHUNK = 16
_KILLED = "the process that analyzed it was killed; it is not scanned"

# The result of one file and its key; None for a file that could not be read.
Keyed = tuple[bytes | None, FileResult]


def scan_files(
    paths: Sequence[str],
    cache: Cache,
    *,
    jobs: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, FileResult]:
    """Return the result of every file, in the order of the paths.

    Args:
        paths: the files, each once.
        cache: is asked first, and told what is new.
        jobs: how many processes; by default as many as there are cores and work for.
        progress: is told how many files of those that the cache does not know are done.
    """
    found: dict[str, FileResult] = {}
    for path in paths if not cache.empty else ():
        try:
            known = cache.get(key(read(path), path), path)
        except UnreadableError as error:
            known = _unreadable(path, error)
        if known is not None:
            found[path] = known
    missing = [path for path in paths if path not in found]
    fresh: list[tuple[bytes, FileResult]] = []
    try:
        for done, (name, result) in enumerate(_analyze(missing, jobs or _jobs(len(missing)))):
            progress(done, len(missing))
            found[result.path] = result
            if name is not None:
                fresh.append((name, result))
    finally:
        cache.put(fresh)
    return {path: found[path] for path in paths}


def scan_file(path: str) -> Keyed:
    """Return one file's key and result; never raises for what the file is."""
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


def _analyze(paths: list[str], jobs: int) -> Iterator[Keyed]:
    if jobs <= 1:
        yield from map(scan_file, paths)
        return
    lost: list[str] = []
    for chunk, results in _in_pool([paths[at : at + _CHUNK] for at in range(0, len(paths), _CHUNK)], jobs):
        yield from results or ()
        lost += chunk if results is None else ()
    # A file that kills its process took others with it: each one now gets a process of its own.
    for path in lost:
        for _, results in _in_pool([[path]], 1):
            yield from results or [(None, FileResult(path, errors=(Diagnostic(path, 0, 0, _KILLED),)))]


def _in_pool(chunks: list[list[str]], jobs: int) -> Iterator[tuple[list[str], list[Keyed] | None]]:
    """Yield each chunk with its results, None if the process that had it died."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Python 3.14's default on Linux, as that of other systems, runs the caller's script again in each worker.
    unset = sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None
    context = multiprocessing.get_context("fork" if unset else None)
    with ProcessPoolExecutor(max_workers=min(jobs, len(chunks)), mp_context=context) as pool:
        futures = {pool.submit(scan_chunk, chunk): chunk for chunk in chunks}
        try:
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except BrokenProcessPool:
                    yield futures[future], None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # nobody reads the rest
            raise


def scan_chunk(paths: list[str], scan: Callable[[str], Keyed] = scan_file) -> list[Keyed]:
    """Return the results of some files: the work of one process."""
    return [scan(path) for path in paths]
