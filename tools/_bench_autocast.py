"""What may travel in low precision, and what does: derived parameters against DeepSpeed's default list.

Two ranks train small models with gloo on CPU (see _bench_autocast_worker.py, which also says what is
counted). The exit status is 0 only if every case ran.
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

WORKER = Path(__file__).resolve().parent / "_bench_autocast_worker.py"
RANKS = 2
LIMIT = 540.0
Row = dict[str, Any]


class RanksError(Exception):
    """A rank ended without a result; the message is the end of what it printed."""


def run_ranks(folder: Path) -> Row:
    """Return what rank 0 measured.

    Raises:
        RanksError: a rank crashed, or they ran past the time limit.

    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(RANKS):
            command = [sys.executable, str(WORKER), str(folder / f"{rank}.json")]
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        command, env={**os.environ, **world, **ids}, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        for process in ranks:
            process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise RanksError(f"no result after {LIMIT:.0f} s") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, process in enumerate(ranks):
        if process.returncode != 0:
            text = (folder / f"{rank}.log").read_text(errors="replace")
            raise RanksError("\n".join(text.splitlines()[-12:]) or f"exit status {process.returncode}")
    result: Row = json.loads((folder / "0.json").read_text())
    return result


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    names = ("transformers", "deepspeed", "torch", "safe-rope")
    versions = {name: importlib.metadata.version(name) for name in names}
    print("training small models on two ranks ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen = run_ranks(Path(folder))
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
    for failure in seen["failures"]:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if seen["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
