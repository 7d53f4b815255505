"""Show what DeepSpeed and dtype casts do to a Llama's position tables, and the guard.

Every load path runs in processes of its own (worker.py, which also says what the figures are), two at a time,
with stock code and under the guard. The exit status is 0 only if nothing failed and every guarded figure is
within 1e-6.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _process import ToolError, say

from laboratory.ranks import run_ranks
from laboratory.report import versions, wide_console

LIMIT = 800.0
BY_ACCELERATE = "zero3_from_pretrained"
PATHS: tuple[str, ...] = ("zero_init", BY_ACCELERATE, "to_bf16")
KINDS = ("stock", "guarded")
# A table that is right in FP32 is off by 3e-8; one that came through FP32 phases by 1e-4 at 4,096 positions.
ERROR_LIMIT = 1e-6
# Three rounds of two.
WORKER_LIMIT = 250.0
Row = dict[str, Any]


def measure(path: str, kind: str, folder: Path) -> list[Row]:
    """Return one row per measurement of the path.

    Raises:
        ToolError: the worker crashed or ran past its time limit.

    """
    result = folder / f"{path}-{kind}.json"
    run_ranks(lambda rank: ["-m", "laboratory.demo.worker", path, kind, result], limit=WORKER_LIMIT)
    rows: list[Row] = json.loads(result.read_text())
    return rows


def run_all() -> tuple[list[Row], list[str]]:
    """Return the rows, with what each kind measured under its name, and the failures as text."""
    rows: dict[str, Row] = {}
    failures = []
    paths = PATHS
    if importlib.util.find_spec("accelerate") is None:
        say("transformers loads under ZeRO-3 with accelerate, which is not installed: left out")
        paths = tuple(path for path in PATHS if path != BY_ACCELERATE)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {
            (path, kind): pool.submit(measure, path, kind, Path(folder)) for path in paths for kind in KINDS
        }
        for (path, kind), job in jobs.items():
            try:
                measured = job.result()
            except ToolError as error:
                failures.append(f"{path}, {kind}: {error}")
                continue
            for row in measured:
                title = row.pop("path")
                rows.setdefault(title, {"path": title})[kind] = row
    for row in rows.values():
        guarded = row.get("guarded")
        row["ok"] = guarded is not None and "stock" in row and within_limit(guarded)
    return list(rows.values()), failures


def within_limit(measured: Row) -> bool:
    # Written so that NaN is outside.
    return bool(measured["phase_error"] <= ERROR_LIMIT and measured["cos_error"] <= ERROR_LIMIT)


def table_of(rows: list[Row]) -> Any:
    """Return the rows as a table of rich."""
    from rich.table import Table

    title = "Llama, head_dim 128, error at position 4,095 against float64\n"
    table = Table(title=title + ", ".join(f"{name} {version}" for name, version in versions().items()))
    table.add_column("load path")
    for kind in KINDS:
        style = "red" if kind == "stock" else "green"
        table.add_column(f"{kind}\nphase (rad)", justify="right", style=style, no_wrap=True)
        table.add_column(f"{kind}\ncos, sin", justify="right", style=style, no_wrap=True)
    for row in rows:
        cells = []
        for kind in KINDS:
            measured = row.get(kind)
            if measured is None:
                cells += ["failed", "failed"]
            else:
                sign = "≥ " if measured["at_least"] and not within_limit(measured) else ""
                cells += [f"{sign}{measured['phase_error']:.2g}", f"{measured['cos_error']:.2g}"]
        table.add_row(row["path"], *cells)
    return table


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="a table, or one JSON object"
    )


def main(options: argparse.Namespace) -> int:
    say("loading a small Llama through three paths, each without and with the guard ...")
    rows, failures = run_all()
    if options.format == "json":
        found = {"versions": versions(), "limit": ERROR_LIMIT, "rows": rows, "failures": failures}
        print(json.dumps(found, indent=1))
    elif rows:
        wide_console().print(table_of(rows))
    for failure in failures:
        say(f"failed: {failure}")
    bad = [row["path"] for row in rows if not row["ok"]]
    if bad:
        say(f"not within {ERROR_LIMIT:g} of float64 under the guard: {'; '.join(bad)}")
    return 1 if failures or bad or not rows else 0
