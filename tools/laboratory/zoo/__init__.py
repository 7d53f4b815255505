"""Send every architecture of the installed transformers through the load paths that damage positions.

Each runs in a process of its own and makes a line of JSON. The exit status is 1 if the guard leaves a
position table damaged or breaks a load.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import logging
import random
import time
from pathlib import Path
from typing import Any

from _process import say

from laboratory.forked import in_child, one_rank
from laboratory.report import progress_bar, read_rows
from laboratory.zoo.summary import TITLES, fails, markdown, problems, summarize, verdicts

LIMIT = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; what is in it is not redone")
    parser.add_argument("--sample", type=int, metavar="N", help="N architectures at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    parser.add_argument("--also", default="", help="comma-separated model types besides the sample")
    parser.add_argument("--only", help="comma-separated model types")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth architecture, from the Ith")
    parser.add_argument("--scenarios", default=",".join(TITLES))
    parser.add_argument("--kind", choices=("both", "stock", "guard"), default="both")
    parser.add_argument("--audit", action="store_true", help="ask the audit too: its verdict against ours")
    parser.add_argument("--tables-only", action="store_true", help="leave out whether guarded models run")
    parser.add_argument("--limit", type=float, default=120.0, dest="seconds", help="for one architecture")
    parser.add_argument("--largest", type=float, default=24.0, help="million parameters still built")
    parser.add_argument(
        "--memory",
        type=float,
        default=5.0,
        help="GiB for one architecture; what needs more counts as too large to be built",
    )
    parser.add_argument("--budget", type=float, help="seconds after which no further architecture is begun")
    parser.add_argument(
        "--summary",
        action="store_true",
        help="only read the output and summarize it; with --audit, print the verdicts as JSON lines",
    )
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="further outputs to summarize")
    parser.add_argument("--markdown", action="store_true", help="the summary as a table for the docs")


def main(options: argparse.Namespace) -> int:
    done = _read(options.output)
    if options.summary:
        files = [done, *map(_read, options.more)]  # later ones supersede
        rows = list({(row["pair"], name): row for file in files for name, row in file.items()}.values())
        if options.audit:
            print("\n".join(json.dumps(verdicts(row)) for row in rows if row["status"] == "built"))
            return 0
        print(markdown(rows) if options.markdown else summarize(rows))
        return 0
    rows = _survey(options, done)
    print(markdown(rows) if options.markdown else summarize(rows))
    return int(any(map(fails, rows)))


def _survey(options: argparse.Namespace, done: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Survey what is asked for and not done; return the lines of all that is asked for."""
    one_rank()
    from laboratory.zoo import worker  # imports torch, and so comes after the environment
    from laboratory.zoo.shrink import config_classes

    logging.disable(logging.WARNING)
    worker.prepare()
    names = _choose(options, sorted(config_classes()))
    random.Random(options.seed).shuffle(names)  # so that a part of the survey is a sample of it
    first, step = map(int, options.part.split("/"))
    names = names[first - 1 :: step]
    left = [name for name in names if name not in done]
    say(f"{len(names)} architectures, {len(names) - len(left)} done already")
    scenarios = tuple(options.scenarios.split(","))
    kinds = ("stock", "guard") if options.kind == "both" else (options.kind,)
    deadline = time.monotonic() + options.budget if options.budget else None
    with options.output.open("a") as output, progress_bar(len(left)) as advance:
        for name in left:
            if deadline and time.monotonic() > deadline:
                break
            largest = round(options.largest * 1e6)
            also = {"audits": options.audit, "forwards": not options.tables_only}
            work = functools.partial(worker.survey, name, scenarios, kinds, largest, **also)
            row = in_child(work, options.seconds, round(options.memory * 2**30))
            row = {"model_type": name, **row, "pair": pair()}
            output.write(json.dumps(row) + "\n")
            output.flush()
            done[name] = row
            found = next(problems(row), "")
            line = f"{name}: {row['status']} {row.get('reason', '')} {found}"[:300] if fails(row) else ""
            advance(1, name, line)
    return [done[name] for name in names if name in done]


def _choose(options: argparse.Namespace, known: list[str]) -> list[str]:
    if options.only:
        return [name for name in options.only.split(",") if name in known]
    if options.sample:
        sample = random.Random(options.seed).sample(known, min(options.sample, len(known)))
        return sorted({*sample, *(name for name in options.also.split(",") if name in known)})
    return known


def pair() -> str:
    """The installed version pair."""
    return f"{importlib.metadata.version('transformers')} + {importlib.metadata.version('deepspeed')}"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    return {row["model_type"]: row for row in read_rows(path)}
