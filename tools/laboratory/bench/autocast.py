"""Engines with torch.autocast on two ranks: how far from DDP, and what they send and hold.

Two ranks train small models with gloo on CPU (see _bench_autocast_worker.py, which also says what is
counted, and tests/autocast/parity.py, which trains the reference). The exit status is 0 if every case ran.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TOOLS = Path(__file__).resolve().parent
TESTS = TOOLS.parent / "tests" / "autocast"
MODELS = ("llama", "llama tied", "gpt2", "mixtral eager", "mixtral batched")  # tests/autocast/tiny_models.py
RANKS = 2
LIMIT = 540.0
GRID_LIMIT = 3000.0
Row = dict[str, Any]


class RanksError(Exception):
    """A rank ended without a result; the message is the end of what it printed."""


def run_ranks(folder: Path, script: Path, *arguments: str, limit: float = LIMIT) -> Any:
    """Return what rank 0 wrote to the file that is the script's first argument.

    Raises:
        RanksError: a rank crashed, or they ran past the time limit.

    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    world |= {"SECONDS_TO_DUMP": str(limit)}
    world["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    ranks = []
    try:
        for rank in range(RANKS):
            command = [sys.executable, str(script), str(folder / f"{rank}.json"), *arguments]
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        command, env={**os.environ, **world, **ids}, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        for process in ranks:
            process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        raise RanksError(f"no result after {limit:.0f} s") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, process in enumerate(ranks):
        if process.returncode != 0:
            text = (folder / f"{rank}.log").read_text(errors="replace")
            raise RanksError("\n".join(text.splitlines()[-12:]) or f"exit status {process.returncode}")
    return json.loads((folder / "0.json").read_text())


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument(
        "--parity",
        choices=["none", "covering", "grid"],
        default="covering",
        help="which combinations of stage, accumulation, clipping and buffers to compare with DDP; the grid "
        "takes about half an hour (default: %(default)s)",
    )
    options = parser.parse_args()
    names = ("transformers", "deepspeed", "torch", "safe-rope")
    versions = {name: importlib.metadata.version(name) for name in names}
    print("training small models on two ranks ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen: Row = run_ranks(Path(folder), TOOLS / "autocast_worker.py")
            seen["parity"] = []
            if options.parity != "none":
                pairs = [word for dtype in ("bfloat16", "float16") for m in MODELS for word in (m, dtype)]
                limit = GRID_LIMIT if options.parity == "grid" else LIMIT
                script = TESTS / "parity_worker.py"
                cases = run_ranks(Path(folder), script, options.parity, *pairs, limit=limit)
                seen["parity"] = parity_rows(cases)
        except RanksError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.format == "json":
        print(json.dumps({"versions": versions} | seen, indent=1))
    else:
        # Not narrower than the tables where the output is no terminal.
        console = Console(width=None if sys.stdout.isatty() else 110)
        console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
        console.print(shares_table(seen["shares"]))
        console.print(bytes_table(seen["bytes"]))
        console.print(staging_table(seen["staging"]))
        if seen["parity"]:
            console.print(parity_table(seen["parity"]))
    for failure in seen["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if seen["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
