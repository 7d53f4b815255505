"""Measure `safe-rope scan` on unpacked wheels of transformers.

Each measure takes the paths that it needs; the exit status is 1 if one misses its target.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from _process import ToolError

LIMIT = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--labels", type=Path, help="the labelled set (JSON lines), made from 4.36.2")
    for version in ("4.36.2", "4.38.2", "5.23.0"):
        name = f"tf_{version.replace('.', '_')}"
        parser.add_argument(
            f"--tf-{version}", dest=name, type=Path, metavar="DIR", help=f"transformers {version}, unpacked"
        )
    parser.add_argument(
        "--held-out",
        type=Path,
        metavar="DIR",
        help="with --labels: unseen packages, unpacked into folders named as in the labels",
    )
    parser.add_argument(
        "--builder",
        metavar="PYTHON",
        help="a Python with torch, deepspeed and 5.23.0's dependencies: builds classes",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="DIR",
        help="run semgrep and TorchFix too; installed into DIR if need be",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="compare on every Nth file (TorchFix is slow)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--execute",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="instead: run what each safe fix in unpacked sources changes, before and after",
    )


def main(options: argparse.Namespace) -> int:
    if options.execute:
        from laboratory.scan_eval import execute

        return execute.execute(options.execute)
    from laboratory.scan_eval import measure

    rows: measure.Rows = []
    if options.labels and options.held_out:
        rows += measure.held_out(options.labels, options.held_out)
    if options.labels and options.tf_4_36_2:
        rows += measure.labelled(options.labels, options.tf_4_36_2)
    if options.tf_4_38_2:
        rows += measure.survivors(options.tf_4_38_2)
    if options.tf_5_23_0:
        rows += measure.newest(options.tf_5_23_0, options.builder)
    if options.compare:
        rows += measure.compared(
            options.compare, options.labels, options.tf_4_36_2, options.tf_5_23_0, options.every
        )
    if not rows:
        raise ToolError("give --labels with --tf-4.36.2 or --held-out, --tf-4.38.2 or --tf-5.23.0")
    if options.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        for name, value, target, met in rows:
            print(f"{name:58} {value:>22}  {target:12} {'' if met is None else 'ok' if met else 'MISSED'}")
    return int(any(row.met is False for row in rows))
