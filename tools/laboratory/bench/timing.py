"""Measures this library's position embeddings against others', side by side in one run.

Each section is a module with ``measure(device) -> list[Row]``; a row is a comparison of two times.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

SECTIONS = {
    "tables": "laboratory.bench.tables",
    "application": "laboratory.bench.application",
    "training": "laboratory.bench.training",
    "loading": "laboratory.bench.loading",
}
"""Option and module of each section."""


@dataclass(frozen=True)
class Row:
    """One comparison: ``ours`` against ``other``, seconds, of several rounds that alternate.

    ``noise`` is how far the ratio strays from 1 where both are the same; a target is missed beyond it.
    """

    what: str
    against: str
    ours: float
    other: float
    target: float | None = None
    noise: float = 0.0

    @property
    def ratio(self) -> float:
        return self.ours / self.other

    @property
    def missed(self) -> bool:
        return self.target is not None and self.ratio > self.target + self.noise


def clock(device: str) -> Callable[[], float]:
    """Return the clock for ``device``, in seconds.

    One thread on the CPU is measured by the time that the process had: other programs' does not count.
    """
    alone = not device.startswith("cuda") and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def best_times(calls: list[Callable[[], Any]], device: str, seconds: float = 1.5) -> list[float]:
    """Return the shortest time of each call; they take turns, so that a slow moment meets all of them."""
    best, now = [float("inf")] * len(calls), clock(device)
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            _wait(device)
            start = now()
            call()
            _wait(device)
            best[index] = min(best[index], now() - start)
        rounds += 1
    return best


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    """Describe what the figures belong to."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "clock": clock(device).__name__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def show(section: str, rows: list[Row]) -> None:
    """Print a section's rows as a table."""
    table = Table("what", "ours (ms)", "other (ms)", "ratio", "target", "against", title=section)
    for row in rows:
        noise = f" ± {row.noise:.3f}" if row.noise else ""
        target = "" if row.target is None else f"{row.target:.2f}{noise} {'MISSED' if row.missed else 'ok'}"
        times = f"{row.ours * 1e3:.4g}", f"{row.other * 1e3:.4g}"
        table.add_row(row.what, *times, f"{row.ratio:.3f}", target, row.against)
    Console(width=140).print(table)


def main() -> int:
    """Run the sections that are asked for; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="tools/bench_rope", description=__doc__)
    for section in SECTIONS:
        parser.add_argument(f"--{section}", action="store_true", help=f"measure the {section} (default: all)")
    parser.add_argument(
        "--shape", metavar="TEXT", default="", help="only the application's shapes that end so"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="for torch on CPU (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; leave --device out")
    torch.set_num_threads(options.threads)
    chosen = [section for section in SECTIONS if getattr(options, section)] or list(SECTIONS)
    found: dict[str, Any] = {"machine": machine(options.device)}
    missed = False
    for section in chosen:
        limits = {"ending": options.shape} if section == "application" else {}
        rows: list[Row] = importlib.import_module(SECTIONS[section]).measure(options.device, **limits)
        show(section, rows)
        found[section] = [{**asdict(row), "ratio": row.ratio} for row in rows]
        missed |= any(row.missed for row in rows)
        if section == "application":
            found["others"] = importlib.import_module("_bench_others").availability(options.device)
            print(*(f"{name}: {state}" for name, state in found["others"].items()), sep="\n")
    print(", ".join(f"{name}: {value}" for name, value in found["machine"].items()), file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(missed)
