"""Finds the files to scan: in directories, in an installed package, without importing anything."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from safe_rope.errors import SafeRopeError
from safe_rope.scan.engine import Diagnostic
from safe_rope.scan.run.settings import compiled

SUFFIXES = (".py", ".pyw", ".ipynb")

# Directories below a scanned one that hold no source of its owner. A path given by name is always entered.
EXCLUDED_DIRECTORIES = {
    ".bzr", ".direnv", ".eggs", ".git", ".hg", ".idea", ".ipynb_checkpoints", ".jj", ".mypy_cache", ".nox",
    ".pytest_cache", ".ruff_cache", ".svn", ".tox", ".venv", ".vscode", "__pycache__", "__pypackages__",
    "build", "dist", "node_modules", "site-packages", "venv",
}  # fmt: skip


# A directory, a pattern of its .gitignore, and whether that takes in again, and is about directories only.
Ignoring = tuple[str, re.Pattern[str], bool, bool]


def walk(
    root: str, excluded: Callable[[str], bool], ignoring: Callable[[str], bool] = lambda directory: False
) -> Iterator[str | Diagnostic]:
    """Yield the Python files and notebooks below a directory in sorted order, and what cannot be entered.

    Args:
        root: the directory.
        excluded: says whether a path is to be passed over.
        ignoring: says whether a directory's .gitignore, and those above it in its repository, count.

    Symbolic links are followed, but for those to a directory above; what is reached twice is scanned once.
    """
    seen: set[tuple[int, int]] = set()
    # Each entry is a directory, and what its .gitignore and those above it say.
    outer = _above(root) if ignoring(root) else ()
    stack: list[tuple[str, tuple[Ignoring, ...]]] = [(root, outer)]
    while stack:
        directory, ignored = stack.pop()
        try:
            status = os.stat(directory)
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(directory) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            yield Diagnostic(directory, 0, 0, f"cannot be read: {error.strerror or error}")
            continue
        if ignoring(directory) and any(entry.name == ".gitignore" for entry in found):
            ignored += tuple(_gitignore(directory))
        below = []
        here = os.path.abspath(directory).replace(os.sep, "/")
        for entry in found:
            path = entry.name if directory == os.curdir else entry.path
            if ignored and _is_ignored(f"{here}/{entry.name}", entry.is_dir(), ignored):
                continue
            if os.path.isdir(entry):
                if not _skipped(entry.name, path) and not _leads_up(entry) and not excluded(path):
                    below.append((path, ignored))
            elif entry.name.endswith(SUFFIXES) and not entry.name.startswith(".#") and not excluded(path):
                yield path
        stack += reversed(below)


def _gitignore(directory: str) -> Iterator[Ignoring]:
    """Yield what a directory's .gitignore says."""
    try:
        text = Path(directory, ".gitignore").read_text(errors="surrogateescape")
    except OSError:
        return
    here = os.path.abspath(directory).replace(os.sep, "/")
    for line in text.splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            again = pattern.startswith("!")
            yield here, compiled(pattern[again:], below=False), again, pattern.endswith("/")


def _above(root: str) -> tuple[Ignoring, ...]:
    """Return what the .gitignore files above a directory say, from the root of its repository."""
    found: list[Ignoring] = []
    directory = Path(os.path.abspath(root))
    while not (directory / ".git").exists():
        if directory == directory.parent:
            return ()
        directory = directory.parent
        found = [*_gitignore(str(directory)), *found]
    return tuple(found)


def _is_ignored(path: str, is_directory: bool, ignored: tuple[Ignoring, ...]) -> bool:
    """Say whether the last pattern that matches an absolute path leaves it out."""
    for directory, pattern, again, directories in reversed(ignored):
        if (is_directory or not directories) and pattern.match(path, len(directory) + 1):
            return not again
    return False


def _leads_up(entry: os.DirEntry[str]) -> bool:
    """Say whether it is a symbolic link to a directory that it is in."""
    if not entry.is_symlink():
        return False
    target = os.path.realpath(entry.path)
    return os.path.commonpath([target, os.path.realpath(os.path.dirname(entry.path))]) == target


def _skipped(name: str, path: str) -> bool:
    if name in EXCLUDED_DIRECTORIES or name.endswith(".egg-info"):
        return True
    return os.path.exists(os.path.join(path, "pyvenv.cfg"))


def package_paths(name: str) -> list[str]:
    """Return the directories or the file of an installed package; nothing is imported.

    Raises:
        SafeRopeError: there is no such package, or it has no Python source.
    """
    top, *parts = name.split(".")
    if not all(part.isidentifier() for part in (top, *parts)):
        raise SafeRopeError(
            f"--package takes the name that one imports, got {name!r}; give a path as an argument"
        )
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise SafeRopeError(
            f"no package {top!r} is installed beside safe-rope; install it here or give its path"
        )
    paths = list(spec.submodule_search_locations or ())
    if not paths and isinstance(spec.loader, importlib.machinery.SourceFileLoader) and spec.origin:
        paths = [spec.origin]
    for part in parts:
        below = [[os.path.join(path, part), os.path.join(path, f"{part}.py")] for path in paths]
        paths = [found for some in below for found in list(filter(os.path.exists, some))[:1]]
    if not paths:
        raise SafeRopeError(f"package {name!r} has no Python source to scan")
    here = os.getcwd() + os.sep
    return [path.removeprefix(here) for path in paths]
