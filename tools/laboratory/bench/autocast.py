"""Engines with torch.autocast on two ranks: how far from DDP, and what they send and hold.

Two ranks train small models with gloo on CPU (autocast_worker.py, which also says what is counted, and
tests/autocast/parity.py, which trains the reference). The exit status is 0 if every case ran.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _process import say
from rich.table import Table

from laboratory.ranks import run_ranks
from laboratory.report import versions, wide_console

TESTS = Path(__file__).resolve().parents[3] / "tests" / "autocast"
MODELS = ("llama", "llama tied", "gpt2", "mixtral eager", "mixtral batched")  # tests/autocast/tiny_models.py
RANKS = 2
LIMIT = 540.0
GRID_LIMIT = 3000.0
Row = dict[str, Any]


def measure(program: list[str | Path], *arguments: str, limit: float = LIMIT) -> Any:
    """Return what rank 0 wrote to the file that is the program's first argument.

    Raises:
        ToolError: a rank crashed, or they ran past the time limit (in seconds).

    """
    # Of tests/autocast, for the reference that its programs train.
    env = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, sys.path)]),
        "SECONDS_TO_DUMP": str(limit),
    }
    with tempfile.TemporaryDirectory() as folder:

        def command(rank: int) -> list[str | Path]:
            return [*program, Path(folder, f"{rank}.json"), *arguments]

        run_ranks(command, ranks=RANKS, limit=limit, env=env)
        return json.loads(Path(folder, "0.json").read_text())


def shares_table(rows: list[Row]) -> Table:
    table = Table(title="Share of elements that may travel in bfloat16")
    for column in ("model", "derived", "DeepSpeed's list", "of it unsafe", "trace (s)"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        cells = (f"{row[key]:.3f}" for key in ("derived", "default", "default_unsafe"))
        table.add_row(row["model"], *cells, f"{row['seconds']:.2f}")
    return table


def bytes_table(rows: list[Row]) -> Table:
    table = Table(title="Bytes through collectives in one step, 2 ranks")
    for column in ("model", "ZeRO", "safe set", "bfloat16", "float32", "float32 share", "against default"):
        table.add_column(column, justify="left" if column in ("model", "safe set") else "right")
    totals = {(r["model"], r["stage"], r["kind"]): r["low"] + r["float32"] for r in rows}
    for row in rows:
        total = row["low"] + row["float32"]
        default = totals.get((row["model"], row["stage"], "default"))
        against = "" if row["kind"] == "default" or not default else f"{total / default - 1:+.1%}"
        share = f"{row['float32'] / total:.1%}" if total else "-"
        numbers = f"{row['low']:,}", f"{row['float32']:,}", share, against
        table.add_row(row["model"], str(row["stage"]), row["kind"], *numbers)
    return table


def parity_rows(seen: list[Row]) -> list[Row]:
    """The largest deviation of all cases of a model, dtype and stage; refusals are counted."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for one in seen:
        model, dtype = one["case"].split(", ")[:2]
        groups.setdefault((model, dtype, one["stage"]), []).append(one)
    rows = []
    for (model, dtype, stage), cases in groups.items():
        trained = [one for one in cases if "refused" not in one]
        row: Row = {"model": model, "dtype": dtype, "stage": stage, "cases": len(trained)}
        row["refused"] = len(cases) - len(trained)
        for name in ("norm", "loss", "grads"):
            row[name] = max((one[name] for one in trained), default=None)
        rows.append(row)
    return rows


def parity_table(rows: list[Row]) -> Table:
    table = Table(title="Largest deviation from DDP with torch.autocast in ten steps, 2 ranks")
    columns = ("model", "dtype", "ZeRO", "cases", "refused", "gradient norm", "loss", "first gradient")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "dtype") else "right")
    for row in rows:
        numbers = ("-" if row[name] is None else f"{row[name]:.1e}" for name in ("norm", "loss", "grads"))
        counts = (str(row[name]) for name in ("stage", "cases", "refused"))
        table.add_row(row["model"], row["dtype"], *counts, *numbers)
    return table


def staging_table(rows: list[Row]) -> Table:
    table = Table(title="Staging memory, bytes for each element of the reduce_bucket_size asked for (Llama)")
    for column in ("ZeRO", "overlap_comm", "DeepSpeed", "safe_rope"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row[kind]:.2f}" for kind in ("default", "derived"))
        table.add_row(str(row["stage"]), "on" if row["overlap"] else "off", *numbers)
    return table


def run(options: argparse.Namespace) -> int:
    """Measure what the options say and print it; return 1 if a case did not run.

    Raises:
        ToolError: a rank failed.

    """
    say("training small models on two ranks ...")
    seen: Row = measure(["-m", "laboratory.bench.autocast_worker"])
    seen["parity"] = []
    if options.parity != "none":
        pairs = [(model, dtype) for dtype in ("bfloat16", "float16") for model in MODELS]
        limit = GRID_LIMIT if options.parity == "grid" else LIMIT
        parts = {"parity": {"which": options.parity, "steps": 10, "pairs": pairs}}
        measured = measure([TESTS / "ranks_worker.py"], json.dumps(parts), limit=limit)
        seen["parity"] = parity_rows(measured["parity"])
    if options.format == "json":
        print(json.dumps({"versions": versions()} | seen, indent=1))
    else:
        console = wide_console()
        console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
        for name, table in TABLES.items():
            if seen[name]:
                console.print(table(seen[name]))
    for failure in seen["failures"]:
        say(f"failed: {failure}")
    return 1 if seen["failures"] else 0


TABLES = {"shares": shares_table, "bytes": bytes_table, "staging": staging_table, "parity": parity_table}
