"""What tools/eval_scan measures. Standard library only; the classes are built by another Python."""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laboratory.scan_eval import compare as other_tools
from safe_rope.scan.engine.finding import Finding, apply_edits
from safe_rope.scan.run.analyze import SourceError, analyze

# After upstream's fix (#28760), as published with the labelled set: file, line, whether it is contested.
SURVIVORS = {
    ("bros/modeling_bros.py", 176), ("transfo_xl/modeling_transfo_xl.py", 184),
    ("conditional_detr/modeling_conditional_detr.py", 504), ("mega/modeling_mega.py", 173),
}  # fmt: skip
CONTESTED = {("jukebox/modeling_jukebox.py", 1700)}
ROOT = Path(__file__).resolve().parents[3]
Rows = list[tuple[str, str, str, bool | None]]


def main() -> int:
    """Measure what paths are given for; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="tools/eval_scan", description=__doc__)
    parser.add_argument("--labels", type=Path, help="the labelled set (JSON lines), made from 4.36.2")
    for version in ("4.36.2", "4.38.2", "5.23.0"):
        parser.add_argument(
            f"--tf-{version}", type=Path, metavar="DIR", help=f"transformers {version}, unpacked"
        )
    parser.add_argument(
        "--python", help="a Python with torch, deepspeed and 5.23.0's dependencies: builds classes"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="DIR",
        help="run semgrep and TorchFix too; installed into DIR if need be",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="compare on every Nth file (TorchFix is slow)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = vars(parser.parse_args())
    rows: Rows = []
    if arguments["labels"] and arguments["tf_4.36.2"]:
        rows += labelled(arguments["labels"], arguments["tf_4.36.2"])
    if arguments["tf_4.38.2"]:
        rows += survivors(arguments["tf_4.38.2"])
    if arguments["tf_5.23.0"]:
        rows += newest(arguments["tf_5.23.0"], arguments["python"])
    if arguments["compare"]:
        rows += compared(arguments)
    if not rows:
        parser.error("give --labels with --tf-4.36.2, --tf-4.38.2 or --tf-5.23.0")
    if arguments["json"]:
        keys = ("measure", "value", "target", "met")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
    else:
        for measure, value, target, met in rows:
            print(f"{measure:58} {value:>22}  {target:12} {'' if met is None else 'ok' if met else 'MISSED'}")
    return int(any(met is False for *_, met in rows))


def sources(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path, relative to the folder that holds ``transformers``, and the source of each file."""
    root = folder if (folder / "transformers").is_dir() else folder.parent
    for directory, _, names in os.walk(root / "transformers"):
        for name in names:
            if name.endswith(".py"):
                path = Path(directory, name)
                yield path.relative_to(root).as_posix(), path.read_bytes()


def scan(folder: Path, rules: list[str] | None = None) -> list[Finding]:
    """Return all findings; a file that does not parse has none."""
    found = []
    for path, source in sources(folder):
        try:
            found += analyze(source, path, rules)
        except SourceError as error:
            print(error, file=sys.stderr)
    return found


def labelled(labels: Path, folder: Path) -> Rows:
    """Score against the labels: a row is found where any rule reports its line."""
    rows = [json.loads(line) for line in labels.read_text().splitlines()]
    found = {(finding.path, finding.line): finding.rule for finding in scan(folder)}
    known = {(row["file"], row["line"]) for row in rows}
    unlabelled = found.keys() - known
    result: Rows = []
    for tiers, recall_target, precision_target in (("A", 1.0, 0.98), ("AB", 0.95, 0.95)):
        scored = [row for row in rows if row["tier"] in tiers]
        hazards = {(row["file"], row["line"]) for row in scored if row["label"] == "hazard"}
        benign = {(row["file"], row["line"]) for row in scored if row["label"] == "benign"}
        hits, wrong = len(hazards & found.keys()), len(benign & found.keys())
        recall, precision = hits / len(hazards), hits / (hits + wrong)
        strict = hits / (hits + wrong + len(unlabelled))
        name = "+".join(tiers)
        result.append(
            (
                f"4.36.2 tier {name} recall ({hits}/{len(hazards)})",
                f"{recall:.3f}",
                f">= {recall_target:.2f}",
                recall >= recall_target,
            )
        )
        result.append(
            (
                f"4.36.2 tier {name} precision ({wrong} wrong)",
                f"{precision:.3f}",
                f">= {precision_target:.2f}",
                precision >= precision_target,
            )
        )
        result.append(
            (f"4.36.2 tier {name} precision, unlabelled lines counted wrong", f"{strict:.3f}", "", None)
        )
        result += [
            (f"  missed: {file}:{line}", "", "", None) for file, line in sorted(hazards - found.keys())
        ]
        result += [
            (f"  wrong: {file}:{line}", found[file, line], "", None)
            for file, line in sorted(benign & found.keys())
        ]
    result += [
        (f"  not in the labels: {file}:{line}", found[file, line], "", None)
        for file, line in sorted(unlabelled)
    ]
    return result


def survivors(folder: Path) -> Rows:
    """Compare what SR001 and SR003 leave with the published list."""
    found = {
        ("/".join(finding.path.split("/")[-2:]), finding.line) for finding in scan(folder, ["SR001", "SR003"])
    }
    extra, missing = found - SURVIVORS - CONTESTED, SURVIVORS - found
    rows: Rows = [
        ("4.38.2 SR001+SR003 survivors", str(len(found - CONTESTED)), "exactly 4", not extra and not missing)
    ]
    return rows + [(f"  not expected: {place}", "", "", None) for place in sorted(extra)]


def compared(arguments: dict[str, Any]) -> Rows:
    """Compare with semgrep and TorchFix: speed on 5.23.0, findings on the files that the labels name."""
    folder = arguments["compare"].resolve()
    other_tools.install(folder)
    rows: Rows = []
    if arguments["tf_5.23.0"]:
        files = sorted(sources(arguments["tf_5.23.0"]))[:: arguments["every"]]
        runs = other_tools.compare(files, folder)
        for run in runs:
            text = run.error or f"{run.cpu:.2f} s CPU, {run.wall:.2f} s"
            met = None if run.error or run is runs[0] else runs[0].cpu < run.cpu
            rows.append((f"5.23.0 {run.tool} on {len(files)} files", text, "", met))
    if arguments["labels"] and arguments["tf_4.36.2"]:
        labels = [json.loads(line) for line in arguments["labels"].read_text().splitlines()]
        scored = [row for row in labels if row["tier"] in "AB"]
        hazards = {(row["file"], row["line"]) for row in scored if row["label"] == "hazard"}
        benign = {(row["file"], row["line"]) for row in scored if row["label"] == "benign"}
        named = {row["file"] for row in labels}
        files = [item for item in sources(arguments["tf_4.36.2"]) if item[0] in named]
        for run in other_tools.compare(files, folder):
            hits, wrong = len(run.places & hazards), len(run.places & benign)
            text = run.error or f"{hits / (hits + wrong or 1):.2f}/{hits / len(hazards):.2f}"
            rows.append((f"4.36.2 {run.tool} precision/recall, tiers A+B", text, "", None))
    return rows


def rope_sites(folder: Path) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Return the rope sites, found without the scanner, and those of the one common form.

    A rope site is a ``torch.arange`` with a written floating dtype in what is assigned to an ``inv_freq``.
    The common form divides it by one name and raises the base to it.
    """
    sites, common = set(), set()
    for path, source in sources(folder):
        if b"inv_freq" not in source or b"arange" not in source:
            continue
        for statement in ast.walk(ast.parse(source)):
            if not isinstance(statement, ast.Assign) or "inv_freq" not in ast.unparse(statement.targets[0]):
                continue
            for node in ast.walk(statement.value):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.arange":
                    dtype = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("dtype")
                    if dtype in ("torch.float", "torch.float32"):
                        sites.add((path, node.lineno))
                        text = ast.unparse(statement.value)
                        if text.startswith("1.0 / base ** (torch.arange(0, ") and "config." not in text:
                            common.add((path, node.lineno))
    return sites, common


def speed(folder: Path, runs: int = 3) -> Rows:
    """Measure the command itself, start included: CPU seconds without a cache, and with the one it wrote.

    The best of some runs counts: other programs on a machine add to a run's CPU time and take nothing off it.
    """
    command = [sys.executable, "-m", "safe_rope", "scan", "--jobs", "1", "--statistics", str(folder)]
    taken: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
            for times in taken.values():
                began = resource.getrusage(resource.RUSAGE_CHILDREN)
                done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
                ended = resource.getrusage(resource.RUSAGE_CHILDREN)
                if done.returncode not in (0, 1):
                    raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}")
                times.append(ended.ru_utime - began.ru_utime + ended.ru_stime - began.ru_stime)
    rows: Rows = []
    for (kind, times), target in zip(taken.items(), (4.0, 0.5), strict=True):
        shown = " ".join(f"{seconds:.2f}" for seconds in times)
        rows.append((f"5.23.0 {kind}, CPU seconds, one core", shown, f"<= {target:g}", min(times) <= target))
    return rows


def newest(folder: Path, python: str | None) -> Rows:
    """Measure speed, rope sites, fixes and, with a Python for it, the fixed classes."""
    rows = speed(folder)
    gc.freeze()
    found = scan(folder)
    lines = {(finding.path, finding.line) for finding in found}
    sites, common = rope_sites(folder)
    rows.append(
        (
            f"5.23.0 rope sites of the common form ({len(common)})",
            str(len(common & lines)),
            "239",
            len(common & lines) == 239,
        )
    )
    rows.append(
        (
            f"5.23.0 float aranges that feed an inv_freq ({len(sites)})",
            str(len(sites & lines)),
            "all",
            sites <= lines,
        )
    )
    rows += [(f"  not found: {file}:{line}", "", "", None) for file, line in sorted(sites - lines)]
    with tempfile.TemporaryDirectory() as temporary:
        rows += fix(folder, found, Path(temporary), python)
    return rows


def fix(folder: Path, found: list[Finding], temporary: Path, python: str | None) -> Rows:
    """Apply the safe edits to a copy, scan that again and build its classes."""
    root = folder if (folder / "transformers").is_dir() else folder.parent
    shutil.copytree(
        root / "transformers", temporary / "transformers", ignore=shutil.ignore_patterns("__pycache__")
    )
    safe = [finding for finding in found if finding.fix is not None and finding.fix.safe]
    broken = 0
    for path in sorted({finding.path for finding in safe}):
        edits = {
            edit for finding in safe if finding.path == path and finding.fix for edit in finding.fix.edits
        }
        source = apply_edits((temporary / path).read_bytes(), edits)
        (temporary / path).write_bytes(source)
        try:
            compile(source, path, "exec")
        except SyntaxError:
            broken += 1
    left = [finding for finding in scan(temporary) if finding.fix is not None and finding.fix.safe]
    rows: Rows = [
        ("5.23.0 safe fixes", str(len(safe)), "", None),
        ("5.23.0 fixed files that do not parse", str(broken), "0", broken == 0),
        ("5.23.0 safe fixes left after them", str(len(left)), "0", not left),
    ]
    if python is not None:
        modules = sorted(
            {
                finding.path
                for finding in safe
                if finding.rule in ("SR001", "SR003") and "/modeling_" in finding.path
            }
        )
        stock, fixed = tables(python, root, modules), tables(python, temporary, modules)
        same = [name for name in stock if name in fixed and fixed[name]["plain"] == stock[name]["plain"]]
        survive = [name for name in same if fixed[name]["zero"] == stock[name]["plain"]]
        damaged = [name for name in stock if stock[name]["zero"] != stock[name]["plain"]]
        rows += [
            ("5.23.0 fixed rotary classes built", str(len(stock)), "", None),
            ("5.23.0   damaged by DeepSpeed's wrapper before the fix", str(len(damaged)), "", None),
            ("5.23.0   same FP32 bits after the fix", str(len(same)), "", None),
            (
                "5.23.0   and the same under DeepSpeed's wrapper",
                str(len(survive)),
                ">= 30",
                len(survive) >= 30,
            ),
        ]
        rows += [(f"  other FP32 bits: {name}", "", "", None) for name in sorted(stock.keys() - set(same))]
        rows += [
            (f"  not the same under it: {name}", "", "", None) for name in sorted(set(same) - set(survive))
        ]
    return rows


def tables(python: str, root: Path, modules: list[str]) -> dict[str, dict[str, str]]:
    """Build the rotary classes of a copy of transformers in another Python."""
    worker = Path(__file__).with_name("worker.py")
    names = [module.removesuffix(".py").replace("/", ".") for module in modules]
    result = subprocess.run(
        [python, worker],
        input=json.dumps(names),
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if result.returncode:
        raise SystemExit(f"the classes could not be built:\n{result.stderr[-3000:]}")
    built: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return built
