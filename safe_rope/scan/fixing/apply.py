"""Applies fixes: byte-exact, one whole file or nothing, and only what still parses afterwards."""

from __future__ import annotations

import ast
import difflib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from safe_rope.scan.engine import Diagnostic, Edit, FileResult, Fix, Hit, apply_edits, is_notebook

# Fixes that overlap wait for the next pass; a real file needs two.
MAX_PASSES = 20


@dataclass(frozen=True, slots=True)
class Fixed:
    """A file's source after its fixes, what a scan says about it then, and how many fixes were made."""

    source: bytes
    result: FileResult
    count: int


def fix_source(
    source: bytes,
    result: FileResult,
    wanted: Callable[[FileResult], Iterable[Hit]],
    *,
    unsafe: bool,
    scan: Callable[[bytes, str], FileResult],
) -> Fixed:
    """Apply the fixes of the wanted hits until none is left.

    Args:
        source: the file's bytes.
        result: what a scan says about them.
        wanted: chooses the hits of a result that may be fixed.
        unsafe: also apply the fixes that may change what the code computes.
        scan: says what a scan finds in bytes under a path, to look again after each pass.
    """
    count = 0
    for _ in range(MAX_PASSES):
        fixes = _of(hits := list(wanted(result)))
        kept = {edit for fix in _of(set(result.hits).difference(hits)) for edit in fix.edits}
        chosen = choose([fix for fix in fixes if (fix.safe or unsafe) and kept.isdisjoint(fix.edits)])
        if not chosen:
            break
        changed = apply_edits(source, [edit for fix in chosen for edit in fix.edits])
        if changed == source:
            break
        problem = _problem(changed, result.path)
        if problem:
            # A scan parses no more of a large file than can hold a finding.
            before = _problem(source, result.path)
            why = f"a fix would break it, please report it: {problem}"
            if before:
                why = f"not fixed, it cannot be parsed: {before}"
            error = Diagnostic(result.path, 0, 0, why)
            return Fixed(source, FileResult(result.path, result.hits, errors=(error,)), count)
        source, count = changed, count + len(chosen)
        result = scan(source, result.path)
    return Fixed(source, result, count)


def _of(hits: Iterable[Hit]) -> list[Fix]:
    return [hit.finding.fix for hit in hits if hit.finding.fix is not None]


def choose(fixes: Iterable[Fix]) -> list[Fix]:
    """Return the fixes, in order, that leave each other's bytes alone; equal edits may be shared."""
    chosen: list[Fix] = []
    taken: set[Edit] = set()
    for fix in sorted(fixes, key=lambda fix: min((edit.start for edit in fix.edits), default=0)):
        new = [edit for edit in fix.edits if edit not in taken]
        if new and not any(_collide(edit, other) for edit in new for other in taken):
            chosen.append(fix)
            taken.update(new)
    return chosen


def _collide(one: Edit, other: Edit) -> bool:
    if one.start == other.start:
        return True
    return one.start < other.end and other.start < one.end


def _problem(source: bytes, path: str) -> str | None:
    try:
        if is_notebook(path):
            json.loads(source)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None


def diff(path: str, before: bytes, after: bytes) -> bytes:
    """Return a unified diff that `patch -p1` and `git apply` take."""
    name = os.fsencode(path.replace(os.sep, "/").lstrip("/"))
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        _split(before),
        _split(after),
        b"a/" + name,
        b"b/" + name,
    )
    missing_end = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + missing_end for line in lines)


def _split(data: bytes) -> list[bytes]:
    """Split at line feeds only: for a patch, a carriage return is part of the line."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]
