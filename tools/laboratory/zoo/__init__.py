"""The survey's command: which architectures, one process each, JSON lines, a summary."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laboratory.forked import in_child, one_rank
from laboratory.zoo.summary import ONE_ROUNDING, markdown, rotations, summarize

LIMIT = 120.0
LARGEST = 24.0
MEMORY = 5.0
"""GiB that one architecture may have; what needs more counts as too large to be built."""


def main() -> int:
    """Survey what was asked for; exit 1 if the guard leaves a position table damaged or breaks a load."""
    arguments = _parse()
    done = _read(arguments.output)
    if arguments.summary:
        files = [_read(path) for path in (arguments.output, *arguments.more)]  # later ones supersede
        rows = list({(row["pair"], name): row for file in files for name, row in file.items()}.values())
        print(markdown(rows) if arguments.markdown else summarize(rows))
        return 0
    one_rank()
    from laboratory.zoo import worker  # imports torch, and so comes after the environment
    from laboratory.zoo.shrink import config_classes

    logging.disable(logging.WARNING)
    worker.prepare()
    names = _choose(arguments, sorted(config_classes()))
    random.Random(arguments.seed).shuffle(names)  # so that a part of the survey is a sample of it
    first, step = map(int, arguments.part.split("/"))
    names = names[first - 1 :: step]
    left = [name for name in names if name not in done]
    print(f"{len(names)} architectures, {len(names) - len(left)} done already", file=sys.stderr)
    scenarios = tuple(arguments.scenarios.split(","))
    kinds = ("stock", "guard") if arguments.kind == "both" else (arguments.kind,)
    largest = round(arguments.largest * 1e6)
    deadline = time.monotonic() + arguments.budget if arguments.budget else None
    with arguments.output.open("a") as output, _progress(len(left)) as advance:
        for name in left:
            if deadline and time.monotonic() > deadline:
                break
            work = functools.partial(worker.survey, name, scenarios, kinds, largest)
            row = in_child(work, arguments.limit, round(arguments.memory * 2**30))
            row = {"model_type": name, **row, "pair": pair()}
            output.write(json.dumps(row) + "\n")
            output.flush()
            done[name] = row
            advance(name, row)
    rows = [done[name] for name in names if name in done]
    print(markdown(rows) if arguments.markdown else summarize(rows))
    return int(any(_fails(row) for row in rows))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/zoo_survey", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; what is in it is not redone")
    parser.add_argument("--sample", type=int, metavar="N", help="N architectures at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    parser.add_argument("--also", default="", help="comma-separated model types besides the sample")
    parser.add_argument("--only", help="comma-separated model types")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth architecture, from the Ith")
    parser.add_argument("--scenarios", default="S1,S2,S3,S4,S4a,S5")
    parser.add_argument("--kind", choices=("both", "stock", "guard"), default="both")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one architecture")
    parser.add_argument("--largest", type=float, default=LARGEST, help="million parameters still built")
    parser.add_argument("--memory", type=float, default=MEMORY, help="GiB for one architecture")
    parser.add_argument("--budget", type=float, help="seconds after which no further architecture is begun")
    parser.add_argument("--summary", action="store_true", help="only read the output and summarize it")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="further outputs to summarize")
    parser.add_argument("--markdown", action="store_true", help="the summary as a table for the docs")
    return parser.parse_args()


def _choose(arguments: argparse.Namespace, known: list[str]) -> list[str]:
    if arguments.only:
        return [name for name in arguments.only.split(",") if name in known]
    if arguments.sample:
        sample = random.Random(arguments.seed).sample(known, min(arguments.sample, len(known)))
        return sorted({*sample, *(name for name in arguments.also.split(",") if name in known)})
    return known


def pair() -> str:
    """The installed version pair."""
    return f"{importlib.metadata.version('transformers')} + {importlib.metadata.version('deepspeed')}"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    rows = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
            rows.append(json.loads(line))
    return {row["model_type"]: row for row in rows}


def _fails(row: dict[str, Any]) -> bool:
    if row["status"] not in ("built", "unbuildable"):
        return True
    for results in row.get("scenarios", {}).values():
        guarded, stock = results.get("guard", {}), results.get("stock", {"error": "not asked"})
        if guarded.get("damaged") or ("error" in guarded and "error" not in stock):
            return True
    if any(error > ONE_ROUNDING for _, _, error in rotations([row])):
        return True
    return any(result not in (None, "same") for result in row.get("run", {}).values())


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(name: str, row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=name)
            if _fails(row):
                console.print(f"{name}: {row['status']} {row.get('reason', '')} {_first_problem(row)}"[:300])

        yield advance


def _first_problem(row: dict[str, Any]) -> str:
    for name, results in row.get("scenarios", {}).items():
        guarded, stock = results.get("guard", {}), results.get("stock", {})
        if guarded.get("damaged"):
            return f"{name}: {next(iter(guarded['damaged'].items()))}"
        if "error" in guarded and "error" not in stock:
            return f"{name}: only with the guard: {guarded['error']}"
    return str({kind: result for kind, result in row.get("run", {}).items() if result not in (None, "same")})
