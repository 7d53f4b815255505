"""Finds the files to scan: in directories, in an installed package, without importing anything."""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable, Iterator

from safe_rope.errors import SafeRopeError
from safe_rope.scan.engine import Diagnostic

SUFFIXES = (".py", ".pyw", ".ipynb")

# Directories below a scanned one that hold no source of its owner. A path given by name is always entered.
EXCLUDED_DIRECTORIES = {
    ".bzr", ".direnv", ".eggs", ".git", ".hg", ".idea", ".ipynb_checkpoints", ".jj", ".mypy_cache", ".nox",
    ".pytest_cache", ".ruff_cache", ".svn", ".tox", ".venv", ".vscode", "__pycache__", "__pypackages__",
    "build", "dist", "node_modules", "site-packages", "venv",
}  # fmt: skip


def walk(root: str, excluded: Callable[[str], bool]) -> Iterator[str | Diagnostic]:
    """Yield the Python files and notebooks below a directory in sorted order, and what cannot be entered.

    Symbolic links are followed; a directory that is reached twice is scanned once, and a link to a directory
    above itself is a diagnostic.
    """
    seen: set[tuple[int, int]] = set()
    # Each entry is a directory and the identities of the directories above it.
    stack: list[tuple[str, frozenset[tuple[int, int]]]] = [(root, frozenset())]
    while stack:
        directory, above = stack.pop()
        try:
            status = os.stat(directory)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                yield Diagnostic(directory, 0, 0, "symbolic link to a directory above it, not followed")
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(directory) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            yield Diagnostic(directory, 0, 0, f"cannot be read: {error.strerror or error}")
            continue
        below = []
        for entry in found:
            path = entry.name if directory == os.curdir else entry.path
            if os.path.isdir(entry):
                if not _skipped(entry.name, path) and not excluded(path):
                    below.append((path, above | {identity}))
            elif entry.name.endswith(SUFFIXES) and not entry.name.startswith(".#") and not excluded(path):
                yield path
            elif entry.is_symlink() and _loops(entry.path):
                yield Diagnostic(path, 0, 0, "cannot be read: the symbolic link leads back to itself")
        stack += reversed(below)


def _loops(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


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
