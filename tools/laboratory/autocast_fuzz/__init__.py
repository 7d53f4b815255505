"""Train drawn configurations of torch.autocast for three steps, each beside DDP with torch.autocast.

A configuration is drawn from ZeRO stages, dtypes, accumulation, clipping, overlap, buffers, bucket sizes,
persistent parameters, models, LoRA, low weights, gradient checkpointing and offload. Two ranks train all of
them, engine after engine (worker.py). One line of JSON for each goes to the output. The exit status is 0 if
each trains as DDP does or is refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from _process import say

from laboratory.ranks import run_ranks
from laboratory.report import read_rows

TESTS = Path(__file__).resolve().parents[3] / "tests"
LIMIT = 7200.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--count", type=int, default=300, help="configurations (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("autocast-fuzz.jsonl"), metavar="FILE")


def main(options: argparse.Namespace) -> int:
    env = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "autocast"), *filter(None, sys.path)]),
        "SECONDS_TO_DUMP": str(LIMIT),
    }
    say(f"{options.count} configurations on two ranks ...")
    worker = ["-m", "laboratory.autocast_fuzz.worker", str(options.seed), str(options.count), options.output]
    run_ranks(lambda rank: worker, ranks=2, limit=LIMIT, env=env)
    rows = read_rows(options.output)
    for row in rows:
        if row["deviations"]:
            print(row["case"], *row["deviations"], sep="\n    ")
    kinds = Counter(
        "deviates" if row["deviations"] else "refused" if "refused" in row else "as DDP" for row in rows
    )
    print(", ".join(f"{kind}: {count}" for kind, count in kinds.items()))
    return 1 if kinds["deviates"] else 0
