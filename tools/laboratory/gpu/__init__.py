"""Run everything that needs a GPU, from cheap to dear, and write what each part found.

A part that fails or hangs stops no other. Without a GPU each says in one line that it is skipped;
``--device cpu`` runs them all as far as a CPU goes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

from _process import ToolError, run, say

LIMIT = 2400.0
ROOT = Path(__file__).resolve().parents[3]
BODIES = "llama,gpt_neox,gptj,gemma3_text,phi3,deepseek_v3,cohere,modernbert"


class Part(NamedTuple):
    """One command: arguments of Python, in which {device} and {json} are filled in, and its seconds."""

    name: str
    seconds: float
    command: str
    on_cpu: str = ""
    """Instead of ``command``, where that needs the device itself."""


PARTS = (
    Part("there", 60, "-m laboratory.gpu.steps there --device {device} --json {json}"),
    Part(
        "golden-tables",
        120,
        "-m pytest -q -m gpu tests/system/gpu/test_golden_cuda.py --junit-xml {json}",
        "-m pytest -q tests/tables/test_golden_tables.py --junit-xml {json}",
    ),
    Part("waits", 90, "-m laboratory.gpu.steps waits --device {device} --json {json}"),
    Part("launches", 120, "-m laboratory.gpu.steps launches --device {device} --json {json}"),
    Part("memory", 90, "-m laboratory.gpu.steps memory --device {device} --json {json}"),
    Part("graphs", 120, "-m laboratory.gpu.steps graphs --device {device} --json {json}"),
    Part(
        "kernels",
        240,
        "-m pytest -q -m gpu tests/system/gpu/test_triton.py --junit-xml {json}",
        "-m pytest -q tests/rotation/test_kernels_triton.py --junit-xml {json}",
    ),
    Part(
        "application",
        240,
        "-m laboratory bench application --device {device} --json {json}",
        "-m laboratory bench application --device cpu --shape decoding) --json {json}",
    ),
    Part("tables", 120, "-m laboratory bench tables --device {device} --json {json}"),
    Part(
        "decode",
        420,
        f"-m laboratory bench decode --device {{device}} --only {BODIES} --cases decode,static,prefill "
        "--json {json}",
        "-m laboratory bench decode --only llama --rounds 3 --json {json}",
    ),
    Part("training", 120, "-m laboratory bench training --device {device} --json {json}"),
    Part("zero", 240, "-m laboratory.gpu.steps zero --device {device} --json {json}"),
    Part(
        "compiled",
        300,
        "-m laboratory bench decode --device {device} --only llama --cases compiled --batches 1 "
        "--json {json}",
        "-m laboratory bench decode --only llama --cases compiled --batches 1 --rounds 3 --json {json}",
    ),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for what is found")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the parts (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--minutes", type=float, default=35.0, help="for all parts (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    import torch

    parts = [part for part in PARTS if options.only is None or part.name in options.only.split(",")]
    if options.device == "cuda" and not torch.cuda.is_available():
        for part in parts:
            say(f"{part.name}: skipped, torch {torch.__version__} finds no CUDA device on this machine")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    found = {}
    for part in parts:
        found[part.name] = _carry_out(part, options.device, options.out, deadline)
        say(f"{part.name}: {found[part.name]['status']}, {found[part.name]['seconds']} s")
        (options.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(any(result["status"] == "failed" for result in found.values()))


def _carry_out(part: Part, device: str, out: Path, deadline: float) -> dict[str, object]:
    began = time.monotonic()
    if deadline - began < 20:
        return {"status": "skipped: no time is left", "seconds": 0}
    template = part.on_cpu if device == "cpu" and part.on_cpu else part.command
    suffix = "xml" if "junit" in template else "json"
    path = (out / f"{part.name}.{suffix}").resolve()
    command = [word.format(device=device, json=path) for word in template.split()]
    try:
        status = run([sys.executable, *command], cwd=ROOT, limit=min(part.seconds, deadline - began))
    except ToolError as error:
        return {"status": "failed", "reason": str(error), "seconds": round(time.monotonic() - began, 1)}
    # A bench that misses a target says so with 1; what it measured is there.
    ok = status == 0 or (path.exists() and "bench" in template)
    word = "done" if status == 0 else "done, a target is missed" if ok else "failed"
    return {"status": word, "seconds": round(time.monotonic() - began, 1)}
