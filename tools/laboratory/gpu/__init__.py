"""Run everything that needs a GPU, and write what each part found.

What is not timed runs first and at once, then what is timed, one by one; each from cheap to dear. A part that
fails or hangs stops no other. Without a GPU each says in one line that it is skipped; ``--device cpu`` runs
them all as far as a CPU goes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

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
    timed: bool = False
    """Whether nothing else may run beside it."""


def _step(name: str, seconds: float) -> Part:
    return Part(name, seconds, f"-m laboratory.gpu.steps {name} --device {{device}} --json {{json}}")


PARTS = (
    _step("there", 60),
    _step("waits", 120),
    _step("launches", 120),
    _step("memory", 90),
    _step("graphs", 120),
    _step("zero", 240),
    _step("autocast", 240),
    _step("outputs", 300),
    Part(
        "golden-tables",
        120,
        "-m pytest -q -m gpu tests/system/gpu/test_golden_cuda.py tests/tables --junit-xml {json}",
        "-m pytest -q tests/tables/test_golden_tables.py --junit-xml {json}",
    ),
    Part(
        "kernels",
        300,
        "-m pytest -q -m gpu tests/system/gpu/test_triton.py -n 4 --junit-xml {json}",
        "-m pytest -q tests/rotation/test_kernels_triton.py --junit-xml {json}",
    ),
    Part(
        "graphed-tables",
        240,
        "-m pytest -q -m gpu tests/system/gpu/test_compiled_graphs.py --junit-xml {json}",
    ),
    Part(
        "styles",
        420,
        "-m pytest -q -m gpu tests/system/zoo/test_styles_on_cuda.py -n {half} --junit-xml {json}",
        "-m pytest -q tests/system/zoo/test_harm_cells.py --junit-xml {json}",
    ),
    Part(
        "application",
        300,
        "-m laboratory bench application --device {device} --json {json}",
        "-m laboratory bench application --device cpu --shape decoding) --json {json}",
        timed=True,
    ),
    Part("tables", 120, "-m laboratory bench tables --device {device} --json {json}", timed=True),
    Part(
        "decode",
        420,
        f"-m laboratory bench decode --device {{device}} --only {BODIES} --cases decode,static,prefill "
        "--rounds 24 --json {json}",
        "-m laboratory bench decode --only llama --rounds 3 --json {json}",
        timed=True,
    ),
    Part("training", 120, "-m laboratory bench training --device {device} --json {json}", timed=True),
    Part(
        "compiled",
        300,
        "-m laboratory bench decode --device {device} --only llama --cases compiled,graphed --batches 1 "
        "--rounds 24 --layers 4 --json {json}",
        "-m laboratory bench decode --only llama --cases compiled --batches 1 --rounds 3 --json {json}",
        timed=True,
    ),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--out", type=Path, metavar="DIR", help="a folder for what is found")
    kind.add_argument("--page", action="store_true", help="run nothing; print the page of the records")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the parts (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--minutes", type=float, default=35.0, help="for all parts (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    if options.page:
        from laboratory.gpu.page import page

        print(page(records()), end="")
        return 0
    import torch

    parts = [part for part in PARTS if options.only is None or part.name in options.only.split(",")]
    if options.device == "cuda" and not torch.cuda.is_available():
        for part in parts:
            say(f"{part.name}: skipped, torch {torch.__version__} finds no CUDA device on this machine")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    found: dict[str, dict[str, object]] = {}

    def keep(part: Part) -> None:
        found[part.name] = _carry_out(part, options.device, options.out, deadline)
        say(f"{part.name}: {found[part.name]['status']}, {found[part.name]['seconds']} s")
        (options.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")

    for timed, at_once in ((False, _half()), (True, 1)):
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(keep, (part for part in parts if part.timed == timed)))
    (options.out / "record.json").write_text(json.dumps(_record(options.out, found), indent=1) + "\n")
    return int(any(result["status"] == "failed" for result in found.values()))


def records() -> dict[str, Any]:
    """Return what was found on every machine so far, by the name of its record."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "docs" / "data").glob("gpu-*.json"))
    }


def _record(out: Path, found: dict[str, dict[str, object]]) -> dict[str, Any]:
    """Return what the parts have written, and which of them did not end."""
    record: dict[str, Any] = {"tests": {}}
    for name in found:
        path = out / f"{name}.json"
        if path.exists():
            record[name] = json.loads(path.read_text(encoding="utf-8"))
        elif (report := out / f"{name}.xml").exists():
            suite: Any = ElementTree.parse(report).getroot().find("testsuite")
            failed = int(suite.get("failures")) + int(suite.get("errors"))
            record["tests"][name] = {"tests": int(suite.get("tests")), "failed": failed}
    record["not ended"] = [name for name in found if name not in record and name not in record["tests"]]
    return record


def _half() -> int:
    """Return half of the processor's cores."""
    return max((os.cpu_count() or 1) // 2, 1)


def _carry_out(part: Part, device: str, out: Path, deadline: float) -> dict[str, object]:
    began = time.monotonic()
    if deadline - began < 20:
        return {"status": "skipped: no time is left", "seconds": 0}
    template = part.on_cpu if device == "cpu" and part.on_cpu else part.command
    suffix = "xml" if "junit" in template else "json"
    path = (out / f"{part.name}.{suffix}").resolve()
    command = [word.format(device=device, json=path, half=_half()) for word in template.split()]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"DS_ACCELERATOR": device}
    limit = min(part.seconds, deadline - began)
    try:
        with (out / f"{part.name}.log").open("w") as log:
            status = run([sys.executable, *command], env=environment, cwd=ROOT, limit=limit, output=log)
    except ToolError as error:
        return {"status": "failed", "reason": str(error), "seconds": round(time.monotonic() - began, 1)}
    # A bench that misses a target says so with 1; what it measured is there.
    ok = status == 0 or (path.exists() and "bench" in template)
    word = "done" if status == 0 else "done, a target is missed" if ok else "failed"
    return {"status": word, "seconds": round(time.monotonic() - began, 1)}
