"""Try what people do to a library under everything, many times, and count what fails.

Each part runs in a process of its own, on CPU. Its tries and failures are put into the record as soon as it
has ended; a part that the record has for this commit, seed and scale is left out. The exit status is 0 if
nothing failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from _process import ToolError, say

from laboratory.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
LIMIT = None
PARTS = {
    "orders": 7200.0,
    "interrupts": 3600.0,
    "constructors": 3600.0,
    "calls": 7200.0,
    "guards": 3600.0,
    "threads": 1800.0,
    "processes": 3600.0,
    "training": 3600.0,
}
"""The parts, and the seconds that each may take."""
RECORD = ROOT / "docs" / "data" / "reliability.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the numbers of tries (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="also what the record has")
    parser.add_argument("--output", type=Path, default=RECORD, metavar="FILE", help="the record")
    parser.add_argument("--page", action="store_true", help="run nothing; print the page of a record")


def main(options: argparse.Namespace) -> int:
    from laboratory.soak.page import page

    record = read(options.output)
    if options.page:
        print(page(record), end="")
        return 0
    stamp = {"commit": commit(), "seed": options.seed, "scale": options.scale}
    failed = 0
    for name in options.only or PARTS:
        known = record.get(name)
        if known is None or options.again or {key: known.get(key) for key in stamp} != stamp:
            say(f"{name} ...")
            known = run(name, options) | stamp
            record[name] = known
            write(options.output, record)
        here = sum(kind["failed"] for kind in known["kinds"].values())
        tries = sum(kind["tries"] for kind in known["kinds"].values())
        print(f"{name}: {tries:,} tries, {here} failed, {known['seconds']} s")
        for kind, entry in known["kinds"].items():
            for failure in entry["failures"]:
                print(f"    {kind}: {failure}")
        failed += here
    return 1 if failed else 0


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process that is rank 0 of 1, and return what it counted."""
    from laboratory.report import versions

    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [ROOT / "tests", ROOT / "tools", *before]
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DEEPSPEED_LOG_LEVEL": "error",
        "TQDM_DISABLE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        draws = str(options.seed), str(options.scale)
        worker: list[str | Path] = ["-m", "laboratory.soak.worker", name, *draws, result]
        run_ranks(lambda rank: worker, limit=PARTS[name], env=env)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found | {"date": datetime.date.today().isoformat(), "versions": versions()}


def read(file: Path) -> dict[str, Any]:
    """Return the record in a file, by part; none where there is no file."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ToolError(f"{file} is not the record of a run: {error}") from error
    return found


def write(file: Path, record: dict[str, Any]) -> None:
    """Write the record, its parts in the order of `PARTS`."""
    ordered = {name: record[name] for name in PARTS if name in record}
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit that is checked out, with a sign where the library differs from it."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "safe_rope"], cwd=ROOT, check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.returncode else "")
