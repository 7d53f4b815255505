"""Ask a small model whether damaged position tables matter. About five minutes.

A small Llama is trained in FP32 to recall a token from a distance (task.py). Then

loaded
    its checkpoint goes through each load path, with stock code and under the guard, and answers the same
    16,000 questions;
trained
    the same model is trained from the same start with the tables that stock code made on that path, all else
    in FP32, and then asked twice: with those tables, and with correct ones, as an inference engine has them.

Every part runs in a process of its own (worker.py). The exit status is 0 if all of them ended.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from _process import ToolError, say

from laboratory.ranks import run_ranks
from laboratory.report import versions

LIMIT = 3600.0
# Minutes on a slow core; the longest part takes less than one on a common one.
PART_LIMIT = 900.0
PATHS = {
    "zero_init": "deepspeed.zero.Init, then initialize",
    "zero3_from_pretrained": "ZeRO-3 from_pretrained, then initialize",
    "to_bf16": ".to(torch.bfloat16)",
}
# One rounding of cos to bfloat16 is 2e-3 at most: what is above comes from wrong phases.
DAMAGE = 1e-2
Score = dict[str, Any]


def part(folder: Path, *arguments: str | Path) -> Any:
    """Run one part of the experiment unless ``folder`` holds its result; return that.

    Raises:
        ToolError: it failed, or ran past its time limit.
    """
    if (folder / "result.json").exists():
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))
    say(f"  {' '.join(str(a) for a in arguments if not isinstance(a, Path))} ...")
    try:
        command = ["-m", "laboratory.quality.worker", *arguments, folder]
        run_ranks(lambda rank: command, limit=PART_LIMIT)
    except ToolError as error:
        raise ToolError(f"{folder.name}: {error}") from None
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def cos_error(tables: Path, right: Path) -> float:
    """Return the largest difference of cos or sin between two files of tables."""
    import torch

    one, other = torch.load(tables), torch.load(right)
    return max(float((one[name] - other[name]).abs().nan_to_num(nan=2.0).max()) for name in ("cos", "sin"))


def experiment(seed: int, stride: int, folder: Path) -> dict[str, Any]:
    """Run every part in ``folder`` and return what they found."""
    say("training in FP32 ...")
    base = part(folder / "train", "train", str(seed), "none", str(stride))
    checkpoint = folder / "train" / "checkpoint"
    say("loading through each path ...")
    loaded: dict[str, dict[str, Score]] = {}
    for path in PATHS:
        loaded[path] = {
            kind: part(folder / f"{path}-{kind}", "load", path, kind, checkpoint, str(stride))
            for kind in ("stock", "guarded")
        }
        for kind, score in loaded[path].items():
            score["cos_error"] = cos_error(
                folder / f"{path}-{kind}" / "tables.pt", folder / "train" / "tables.pt"
            )
    say("training with the tables that stock code made ...")
    trained: dict[str, dict[str, Any]] = {}
    for path in PATHS:
        if loaded[path]["stock"]["cos_error"] > DAMAGE:
            own = folder / f"train-{path}"
            tables = folder / f"{path}-stock" / "tables.pt"
            result = part(own, "train", str(seed), tables, str(stride))
            result["served_right"] = part(folder / f"serve-{path}", "score", own / "checkpoint", str(stride))
            trained[path] = result
    return {
        "versions": versions(),
        "seed": seed,
        "stride": stride,
        "base": base,
        "loaded": loaded,
        "trained": trained,
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of the result, in Markdown."""
    base = found["base"]["as_trained"]
    lines = [", ".join(f"{name} {version}" for name, version in found["versions"].items())]
    lines[0] += f"; {found['stride'] * 2048:,} positions"
    lines += [""]
    lines += ["| loaded through | tables | largest error of cos, sin | accuracy | perplexity |"]
    lines += ["|---|---|---|---|---|", f"| (FP32, as trained) | correct | 0 | {_cells(base)} |"]
    for path, kinds in found["loaded"].items():
        for kind, score in kinds.items():
            lines += [f"| {PATHS[path]} | {kind} | {score['cos_error']:.2g} | {_cells(score)} |"]
    lines += ["", "| trained in FP32 with the tables of | asked with | accuracy | perplexity |"]
    lines += ["|---|---|---|---|", f"| FP32 | the same | {_cells(base)} |"]
    for path, result in found["trained"].items():
        lines += [f"| {PATHS[path]} | the same | {_cells(result['as_trained'])} |"]
        lines += [f"| {PATHS[path]} | correct ones | {_cells(result['served_right'])} |"]
    return "\n".join(lines)


def _cells(score: Score) -> str:
    return f"{100 * score['accuracy']:.1f} % | {score['perplexity']:.3g}"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the model and its data")
    parser.add_argument(
        "--stride", type=int, default=16, metavar="N", help="positions from token to token: 16 or 1"
    )
    parser.add_argument("--format", choices=["text", "json"], default="text", help="Markdown, or JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw it (.png, .svg)")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep results there, and reuse them")


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        found = experiment(options.seed, options.stride, Path(options.keep or temporary).absolute())
    print(json.dumps(found, indent=1) if options.format == "json" else markdown(found))
    if options.plot:
        from laboratory.quality.plot import draw

        draw(found, PATHS, options.plot)
    return 0
