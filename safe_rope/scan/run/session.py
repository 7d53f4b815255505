"""One run of the scanner: which files, what counts in them, and the fixes."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from safe_rope._base.files import write_atomically
from safe_rope.scan.engine import Diagnostic, FileResult, Finding, Hit, UnreadableError, read
from safe_rope.scan.fixing import add_noqa, diff, fix_source
from safe_rope.scan.run import files
from safe_rope.scan.run.cache import open_cache
from safe_rope.scan.run.one_file import scan_source
from safe_rope.scan.run.runner import scan_files
from safe_rope.scan.run.selection import Selection
from safe_rope.scan.run.settings import Settings, load_settings


@dataclass(slots=True)
class Targets:
    """The files to scan with their settings, in order, and what was asked for and is not there."""

    settings: dict[str, Settings] = field(default_factory=dict)
    errors: list[Diagnostic] = field(default_factory=list)
    excluded: int = 0


@dataclass(slots=True)
class Changes:
    """What fixes did, or with a diff would do."""

    results: dict[str, FileResult] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    diff: bytes = b""
    errors: list[Diagnostic] = field(default_factory=list)

    @property
    def fixed(self) -> int:
        """How many findings were changed."""
        return sum(self.counts.values())

    @contextlib.contextmanager
    def of(self, path: str) -> Iterator[None]:
        """Take in what goes wrong with one file, and go on."""
        try:
            yield
        except UnreadableError as error:
            self.errors.append(Diagnostic(path, 0, 0, str(error)))
        except OSError as error:
            self.errors.append(Diagnostic(path, 0, 0, f"cannot be fixed: {error.strerror or error}"))


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan found, file by file and from top to bottom, and what it could not scan."""

    findings: tuple[Finding, ...]
    errors: tuple[Diagnostic, ...]


def scan_paths(paths: Iterable[str], settings: Settings | None, *, jobs: int | None) -> Scanned:
    """Scan files and directories; without settings by those of the pyproject.toml nearest to each."""
    found = functools.cache(lambda directory: load_settings(directory) if settings is None else settings)
    targets = collect(paths, (), found)
    with contextlib.closing(open_cache()) as cache:
        results = scan_files(list(targets.settings), cache, jobs=jobs)
    hits = shown(Selection(targets.settings, results, None), results)
    errors = [*targets.errors, *(error for result in results.values() for error in result.errors)]
    return Scanned(tuple(hit.finding for hit in hits), tuple(errors))


def collect(paths: Iterable[str], packages: Iterable[str], settings: Callable[[str], Settings]) -> Targets:
    """Return every file below the paths and in the packages, each once.

    Args:
        paths: files and directories.
        packages: names that one imports.
        settings: gives those of a directory.
    """
    targets = Targets()
    seen: set[str] = set()
    roots = [(path, path if os.path.isdir(path) else os.path.dirname(path) or os.curdir) for path in paths]
    roots += [(path, os.curdir) for package in packages for path in files.package_paths(package)]
    for root, start in roots:
        for path, chosen in _below(root, start, settings):
            if isinstance(path, Diagnostic):
                targets.errors.append(path)
            elif chosen.excludes(path):
                targets.excluded += 1
            elif (known := os.path.abspath(path)) not in seen:
                seen.add(known)
                targets.settings[path] = chosen
    return targets


def _below(
    root: str, start: str, settings: Callable[[str], Settings]
) -> Iterator[tuple[str | Diagnostic, Settings]]:
    """Yield a file, or those below a directory, each with what the pyproject.toml nearest to it says."""
    if not os.path.isdir(root):
        yield root, settings(start)
        return
    top = os.path.normpath(root)

    @functools.cache
    def of(directory: str) -> Settings:
        if directory in (top, ""):
            return settings(start)
        own = os.path.isfile(os.path.join(directory, "pyproject.toml"))
        return settings(directory) if own else of(os.path.dirname(directory))

    def excludes(path: str) -> bool:
        return of(os.path.dirname(path)).excludes(path)

    for path in files.walk(top, excludes, lambda directory: of(directory).respect_gitignore):
        yield path, of(os.path.dirname(path if isinstance(path, str) else path.path))


def shown(selection: Selection, results: Mapping[str, FileResult]) -> list[Hit]:
    """Return the hits to report, file by file and from top to bottom."""
    hits: list[Hit] = []
    for result in results.values():
        if result.hits:
            found = selection.shown(result)
            hits += sorted(found, key=lambda hit: (hit.finding.line, hit.finding.column, hit.finding.rule))
    return hits


def recorded(selection: Selection, results: Mapping[str, FileResult]) -> list[Hit]:
    """Return the hits that a baseline records: generated copies too, so that they can be scanned alone."""
    return [hit for result in results.values() for hit in selection.active(result)]


def fix(selection: Selection, results: Collection[FileResult], *, unsafe: bool, write: bool) -> Changes:
    """Fix every file that has something to fix.

    Args:
        selection: decides what is fixed, from the results as they were before.
        results: of the files to fix.
        unsafe: also apply the fixes that may change what the code computes.
        write: change the files; without it only the diff is made.
    """
    changes = Changes()
    for result in results:
        wanted = [hit.finding.fix for hit in (selection.fixable(result) if result.hits else ())]
        if not any(one is not None and (one.safe or unsafe) for one in wanted):
            continue
        with changes.of(result.path):
            before = read(result.path)
            # Offsets are those of the bytes in hand, whatever happened to the file since it was scanned.
            found = scan_source(before, result.path)
            fixed = fix_source(before, found, selection.fixable, unsafe=unsafe, scan=scan_source)
            if not write:
                changes.errors += fixed.result.errors
                changes.diff += diff(result.path, before, fixed.source)
            elif fixed.source != before:
                write_atomically(result.path, fixed.source, expected=before)
            if fixed.count:
                changes.counts[result.path] = fixed.count
            changes.results[result.path] = fixed.result
    return changes


def silence(selection: Selection, results: Mapping[str, FileResult]) -> Changes:
    """Write a comment after every finding that counts."""
    changes = Changes()
    for path, result in results.items():
        if result.hits and selection.active(result):
            with changes.of(path):
                before = read(path)
                hits = selection.active(scan_source(before, path))
                source, count = add_noqa(before, path, hits, scan_source)
                if count < len(hits):
                    message = f"{len(hits) - count} of {len(hits)} findings cannot be silenced by a comment"
                    changes.errors.append(Diagnostic(path, 0, 0, message))
                if count:
                    write_atomically(path, source, expected=before)
                    changes.counts[path] = count
    return changes
