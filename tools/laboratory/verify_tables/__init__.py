"""Check every entry of the exact tables below 10 million positions against a correctly rounded reference.

The exit status is 1 if an entry is off by more than one ulp, 3 if time was up before all was done.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from _process import say

LIMIT = None
POSITIONS = 10_000_000


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.replace("_", "").replace(",", "").partition(":")
    span = int(first or 0), int(last or POSITIONS)
    if not 0 <= span[0] < span[1] <= 1 << 29:
        raise argparse.ArgumentTypeError(f"{text}: want FIRST:LAST with 0 <= FIRST < LAST <= 2**29")
    return span


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--theta", type=float, action="append", help="rope_theta (default: 1e4, 5e5 and 1e6)")
    parser.add_argument("--dim", type=int, action="append", help="rotary_dim (default: 64 and 128)")
    positions = parser.add_mutually_exclusive_group()
    positions.add_argument(
        "--range",
        type=_span,
        default=(0, POSITIONS),
        metavar="FIRST:LAST",
        help="positions (default: all below 10M)",
    )
    positions.add_argument(
        "--stratum", action="store_true", help="the positions below 65,536 and random blocks, for CI"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random blocks (default: %(default)s)")
    parser.add_argument(
        "--record", type=Path, help="file that keeps what is done; a later call goes on from there"
    )
    parser.add_argument("--seconds", type=float, help="stop after the piece in which this time is up")
    parser.add_argument("--json", action="store_true", help="print JSON, with the entries that are off")


def main(options: argparse.Namespace) -> int:
    import torch

    from laboratory.verify_tables import check

    torch.set_num_threads(1)
    total, complete = check.verify(
        tuple(options.theta or check.THETAS),
        tuple(options.dim or check.DIMS),
        check.stratum(options.seed) if options.stratum else check.pieces(*options.range),
        check.Record(options.record),
        stop_at=time.monotonic() + options.seconds if options.seconds else float("inf"),
        shown=not options.json,
    )
    if options.json:
        rows = [
            {"rope_theta": theta, "rotary_dim": dim, **asdict(count)} for (theta, dim), count in total.items()
        ]
        print(json.dumps({"complete": complete, "found": rows}, indent=1))
    else:
        check.show(total)
    if any(count.over_one_ulp for count in total.values()):
        return 1
    if not complete:
        say("time is up; run it again with the same --record")
        return 3
    return 0
