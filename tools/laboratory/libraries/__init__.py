"""Send position modules and whole models of other libraries through the load paths that damage positions.

Every cell (a subject, a load path, a guard around the building or `protect` afterwards) runs in a process of
its own. What stock and the library give is compared with the same class in plain FP32. The exit status is 1
if a cell is harmed, broken or silently wrong.

The other libraries are no part of a version pair's environment: requirements/libraries.txt says how to make
one that has them, for --python with --here.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import logging
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from _process import say

from laboratory.forked import in_child, one_rank
from laboratory.report import read_rows

LIMIT = None
ATTEMPTS = 3
"""For what another program's hunger may have ended: a timeout, a kill."""
_STDERR = os.dup(2)
"""For progress: a child's own is silent."""

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines; what was surveyed in it is not redone"
    )
    parser.add_argument("--library", action="append", help="only this one; may be given several times")
    parser.add_argument("--only", default="", help="comma-separated parts of names of subjects")
    parser.add_argument("--paths", default="", help="comma-separated load paths; all where left out")
    parser.add_argument("--tables", choices=("fp32", "exact"), default="fp32", help="of guard and protect")
    parser.add_argument("--failures", type=Path, help="where to write a line for each cell that fails")
    parser.add_argument("--limit", type=float, default=60.0, dest="seconds", help="for one cell")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB for one cell")
    parser.add_argument("--summary", action="store_true", help="only read what is there and summarize it")


def main(options: argparse.Namespace) -> int:
    if not options.summary:
        one_rank()
        _survey(options)
    rows = [
        row for row in _read(options.out).values() if not options.library or row["library"] in options.library
    ]
    print(summarize(rows))
    failed = list(failures(rows))
    if options.failures:
        options.failures.write_text("".join(f"{line}\n" for line in failed))
    return int(bool(failed))


def _read(path: Path) -> dict[tuple[str, str], Row]:
    return {(row["library"], row["subject"]): row for row in read_rows(path)}


# ---- running -------------------------------------------------------------------------------------------


def _survey(options: argparse.Namespace) -> None:
    from laboratory.libraries.subjects import LIBRARIES
    from laboratory.zoo import worker as zoo_worker  # imports torch, and so comes after the environment

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    zoo_worker.prepare()
    for name, library in LIBRARIES.items():
        if options.library and name not in options.library:
            continue
        for _ in range(ATTEMPTS):
            work = functools.partial(_library, name, library, options, _read(options.out))
            end = in_child(work, 24 * 3600.0, 1 << 40, distributed=False)
            if end["status"] == "done":
                break
            say(f"{name}: {end['reason']}")


def _library(
    name: str, library: Any, options: argparse.Namespace, done: dict[tuple[str, str], Row]
) -> dict[str, Any]:
    """All subjects of one library, in a process that has imported it and no other."""
    versions = {"library": _version(name), **{other: _version(other) for other in ("torch", "deepspeed")}}
    parts = [part for part in options.only.split(",") if part]
    missing = library.prepare()
    with options.out.open("a") as output, tempfile.TemporaryDirectory() as folder:
        for subject in library.subjects():
            wanted = not parts or any(part in subject.name for part in parts)
            if not wanted or "cells" in done.get((name, subject.name), ()):
                continue
            row: Row = {"library": name, "subject": subject.name, "whole": subject.whole}
            started = time.monotonic()
            row |= {"reason": missing} if missing else _subject(subject, options, Path(folder))
            row |= {"versions": versions, "seconds": round(time.monotonic() - started, 1)}
            output.write(json.dumps(row) + "\n")
            output.flush()
            _progress(row)
    return {"status": "done"}


def _subject(subject: Any, options: argparse.Namespace, folder: Path) -> Row:
    """Truth, then every load path; a subject that plain torch does not build twice alike is no subject."""
    from laboratory.libraries import cell, judge

    memory = round(options.memory * 2**30)
    file = folder / "truth.pt"

    def measured(path: str, how: str | None) -> Row:
        work = functools.partial(cell.measure, subject, path, how, file, options.tables)
        for _ in range(ATTEMPTS):
            found = in_child(work, options.seconds, memory, distributed=path in cell.DISTRIBUTED)
            if found.get("status") != "timeout" and not str(found.get("reason")).endswith("status 9"):
                break
        return {"build": f"{found['status']}: {found['reason']}"} if "status" in found else found

    truth = in_child(
        functools.partial(cell.find_truth, subject, file), options.seconds, memory, distributed=False
    )
    if "status" in truth:
        return {"reason": truth["reason"]}
    paths = [path for path in options.paths.split(",") if path] or list(cell.PATHS)
    plain = measured("plain FP32", None)
    reason = judge.problem(plain, subject.whole)
    if reason:
        return truth | {"reason": f"plain torch does not give the same twice: {reason}"}
    cells = []
    for path in paths:
        stock = plain if path == "plain FP32" else measured(path, None)
        for how in cell.HOW:
            mine = measured(path, how)
            kind, why = judge.kind_of(stock, mine, subject.whole)
            cells.append({"path": path, "how": how, "kind": kind, "reason": why, "mine": mine})
        cells[-1]["stock"] = stock
    return truth | {"cells": [_slim(one) for one in cells]}


def _slim(one: Row) -> Row:
    """What is not about what is wrong: left out of the record."""
    for side in ("mine", "stock"):
        if side in one:
            one[side] = {key: value for key, value in one[side].items() if key not in ("saved", "true")}
    return one


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _progress(row: Row) -> None:
    kinds = Counter(one["kind"] for one in row.get("cells", ()))
    text = row.get("reason") or ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    line = f"{row['library']} {row['subject']} ({row['seconds']} s): {text}"
    os.write(_STDERR, f"{' '.join(line.split())[:300]}\n".encode())


# ---- what came out -------------------------------------------------------------------------------------


def failures(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each cell that must not be: library, subject, path, how, kind, reason."""
    from laboratory.libraries.judge import FAILING

    for row in rows:
        for one in row.get("cells", ()):
            if one["kind"] in FAILING:
                parts = (row["library"], row["subject"], one["path"], one["how"], one["kind"], one["reason"])
                yield " | ".join(parts)


def summarize(rows: list[Row]) -> str:
    """Return the count of each kind of cell, for each library's modules and whole models and in all."""
    from laboratory.libraries.judge import KINDS

    counts: dict[str, Counter[str]] = {}
    subjects: Counter[str] = Counter()
    for row in rows:
        if "cells" in row:
            group = (
                f"{row['library']} {row['versions']['library']}, {'models' if row['whole'] else 'modules'}"
            )
            subjects[group] += 1
            counts.setdefault(group, Counter()).update(one["kind"] for one in row["cells"])
    counts = dict(sorted(counts.items()))
    counts["in all"] = sum(counts.values(), Counter())
    subjects["in all"] = sum(subjects.values())
    width = max(map(len, counts))
    lines = [f"{'':{width}}  subjects  " + "  ".join(KINDS)]
    for group, found in counts.items():
        numbers = "  ".join(f"{found[kind]:{len(kind)}}" for kind in KINDS)
        lines.append(f"{group:{width}}  {subjects[group]:8}  {numbers}")
    for row in rows:
        if "cells" not in row:
            lines.append(f"not surveyed: {row['library']} {row['subject']}: {row['reason']}")
    return "\n".join(lines)
