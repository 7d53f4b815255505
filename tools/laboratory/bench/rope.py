"""The sections that compare times: which are run, what they belong to, and how they are shown.

Each section is a module beside this one with ``measure(device) -> list[Row]``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _process import ToolError
from rich.console import Console
from rich.table import Table

from laboratory.bench import others
from laboratory.bench.timing import Row, clock


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


def run(sections: tuple[str, ...], options: argparse.Namespace) -> int:
    """Measure sections as the options say; return 1 if a target is missed.

    Raises:
        ToolError: the device is not there.

    """
    device: str = options.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ToolError("this machine has no CUDA device; leave --device out")
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {"machine": machine(device)}
    missed = False
    for section in sections:
        limits = {"ending": options.shape} if section == "application" else {}
        rows: list[Row] = importlib.import_module(f"laboratory.bench.{section}").measure(device, **limits)
        show(section, rows)
        found[section] = [{**asdict(row), "ratio": row.ratio} for row in rows]
        missed |= any(row.missed for row in rows)
        if section == "application":
            found["others"] = others.availability(device)
            print(*(f"{name}: {state}" for name, state in found["others"].items()), sep="\n")
    print(", ".join(f"{name}: {value}" for name, value in found["machine"].items()), file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(missed)
