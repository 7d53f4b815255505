"""What `safe-rope scan` finds in whole releases of transformers, how fast, and what its fixes are worth.

The classes of a fixed release are built by another Python.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
Place = tuple[str, int]


class Row(NamedTuple):
    """One measure; ``met`` says whether its target is, where it has one."""

    measure: str
    value: str = ""
    target: str = ""
    met: bool | None = None


Rows = list[Row]


def listed(what: str, places: Collection[Place], rules: Mapping[Place, str] | None = None) -> Rows:
    """Return a row for each place, with the rule that reports it where ``rules`` says so."""
    return [
        Row(f"  {what}: {file}:{line}", (rules or {}).get((file, line), "")) for file, line in sorted(places)
    ]


def read_labels(path: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the labelled set, and the files that it names."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows, {row["file"] for row in rows}


def scored(rows: list[dict[str, Any]], tiers: str) -> tuple[set[Place], set[Place]]:
    """Return the hazards and the benign lines of tiers of the labelled set."""
    places: dict[str, set[Place]] = {"hazard": set(), "benign": set()}
    for row in rows:
        if row["tier"] in tiers and row["label"] in places:
            places[row["label"]].add((row["file"], row["line"]))
    return places["hazard"], places["benign"]


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
    rows, _ = read_labels(labels)
    found = {(finding.path, finding.line): finding.rule for finding in scan(folder)}
    unlabelled = found.keys() - {(row["file"], row["line"]) for row in rows}
    result: Rows = []
    for tiers, recall_target, precision_target in (("A", 1.0, 0.98), ("AB", 0.95, 0.95)):
        hazards, benign = scored(rows, tiers)
        hits, wrong = len(hazards & found.keys()), len(benign & found.keys())
        strict = hits / (hits + wrong + len(unlabelled))
        name = f"4.36.2 tier {'+'.join(tiers)}"
        for what, value, target in (
            (f"recall ({hits}/{len(hazards)})", hits / len(hazards), recall_target),
            (f"precision ({wrong} wrong)", hits / (hits + wrong), precision_target),
        ):
            result.append(Row(f"{name} {what}", f"{value:.3f}", f">= {target:.2f}", value >= target))
        result.append(Row(f"{name} precision, unlabelled lines counted wrong", f"{strict:.3f}"))
        result += listed("missed", hazards - found.keys())
        result += listed("wrong", benign & found.keys(), found)
    return result + listed("not in the labels", unlabelled, found)


def held_out(labels: Path, folder: Path) -> Rows:
    """Score against labels of packages that the rules were not made on, unpacked into a folder for each.

    Recall counts findings of any severity, precision errors and warnings; a contested line counts nowhere.
    Each set of packages is scored for itself, as far as its packages are there, and all of them together.
    """
    rows, _ = read_labels(labels)
    present = [row for row in rows if (folder / row["distribution"]).is_dir()]
    found: dict[Place, str] = {}
    for name in sorted({row["distribution"] for row in present}):
        for file in sorted((folder / name).rglob("*.py")):
            path = file.relative_to(folder).as_posix()
            for finding in analyze(file.read_bytes(), path.removeprefix(f"{name}/")):
                loud = finding.severity != "note" or found.get((path, finding.line), "note") != "note"
                found[path, finding.line] = finding.rule if loud else "note"
    sets = list(dict.fromkeys(row["set"] for row in present))
    result: Rows = []
    for name in [*sets, *(["all"] if len(sets) > 1 else [])]:
        chosen = [row for row in present if name in (row["set"], "all")]
        packages = {row["distribution"] for row in chosen}
        inside = {place: rule for place, rule in found.items() if place[0].partition("/")[0] in packages}
        result += held_out_set(f"held out, {name}", chosen, inside)
    return result


def held_out_set(name: str, rows: list[dict[str, Any]], found: dict[Place, str]) -> Rows:
    """Score the findings of one set; ``found`` gives a rule, or "note", for each line."""
    known = {(f"{row['distribution']}/{row['file']}", row["line"]): row for row in rows}
    result: Rows = []
    for tiers, target in (("A", 1.0), ("AB", 0.95)):
        hazards = {place for place, row in known.items() if row["label"] == "hazard" and row["tier"] in tiers}
        hits = len(hazards & found.keys())
        value = hits / (len(hazards) or 1)
        what = f"{name}: tier {'+'.join(tiers)} recall ({hits}/{len(hazards)})"
        result.append(Row(what, f"{value:.3f}", f">= {target:.2f}", value >= target))
    result += listed("missed", hazards - found.keys())
    contested = {place for place, row in known.items() if row["tier"] == "C"}
    loud = {place for place, rule in found.items() if rule != "note"} - contested
    right = len(loud & hazards)
    precision = right / (len(loud) or 1)
    what = f"{name}: precision of errors and warnings ({right}/{len(loud)})"
    result.append(Row(what, f"{precision:.3f}", ">= 0.95", precision >= 0.95))
    return result + listed("wrong", loud - hazards, found)


def survivors(folder: Path) -> Rows:
    """Compare what SR001 and SR003 leave with the published list."""
    found = {
        ("/".join(finding.path.split("/")[-2:]), finding.line) for finding in scan(folder, ["SR001", "SR003"])
    }
    extra, missing = found - SURVIVORS - CONTESTED, SURVIVORS - found
    count = str(len(found - CONTESTED))
    row = Row("4.38.2 SR001+SR003 survivors", count, "exactly 4", not extra and not missing)
    return [row, *listed("not expected", extra)]


def compared(
    folder: Path, labels: Path | None, labelled: Path | None, newest: Path | None, every: int
) -> Rows:
    """Compare with semgrep and TorchFix: speed on 5.23.0, findings on the files that the labels name.

    Args:
        folder: where both are or are to be installed.
        labels: the labelled set, if it is to be compared on.
        labelled: transformers 4.36.2, unpacked, for the labels.
        newest: transformers 5.23.0, unpacked, for the speed.
        every: of whose files each so many is taken.

    """
    folder = folder.resolve()
    other_tools.install(folder)
    rows: Rows = []
    if newest:
        files = sorted(sources(newest))[::every]
        runs = other_tools.compare(files, folder)
        for run in runs:
            text = run.error or f"{run.cpu:.2f} s CPU, {run.wall:.2f} s"
            met = None if run.error or run is runs[0] else runs[0].cpu < run.cpu
            rows.append(Row(f"5.23.0 {run.tool} on {len(files)} files", text, met=met))
    if labels and labelled:
        known, named = read_labels(labels)
        hazards, benign = scored(known, "AB")
        files = [item for item in sources(labelled) if item[0] in named]
        for run in other_tools.compare(files, folder):
            hits, wrong = len(run.places & hazards), len(run.places & benign)
            text = run.error or f"{hits / (hits + wrong or 1):.2f}/{hits / len(hazards):.2f}"
            rows.append(Row(f"4.36.2 {run.tool} precision/recall, tiers A+B", text))
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


def speed(folder: Path) -> Rows:
    """Measure the command itself, start included: CPU seconds without a cache, and with the one it wrote.

    The best of three counts: other programs on a machine add to a run's CPU time and take nothing off it.
    """
    command = [sys.executable, "-m", "safe_rope", "scan", "--jobs", "1", "--statistics", str(folder)]
    taken: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(3):
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
        rows.append(
            Row(f"5.23.0 {kind}, CPU seconds, one core", shown, f"<= {target:g}", min(times) <= target)
        )
    return rows


def newest(folder: Path, python: str | None) -> Rows:
    """Measure speed, rope sites, fixes and, with a Python for it, the fixed classes."""
    rows = speed(folder)
    gc.freeze()
    found = scan(folder)
    lines = {(finding.path, finding.line) for finding in found}
    sites, common = rope_sites(folder)
    hits = len(common & lines)
    rows += [
        Row(f"5.23.0 rope sites of the common form ({len(common)})", str(hits), "239", hits == 239),
        Row(
            f"5.23.0 float aranges that feed an inv_freq ({len(sites)})",
            str(len(sites & lines)),
            "all",
            sites <= lines,
        ),
        *listed("not found", sites - lines),
    ]
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
    edits: dict[str, set[Any]] = {}
    for finding in safe:
        if finding.fix:
            edits.setdefault(finding.path, set()).update(finding.fix.edits)
    broken = 0
    for path in sorted(edits):
        source = apply_edits((temporary / path).read_bytes(), edits[path])
        (temporary / path).write_bytes(source)
        try:
            compile(source, path, "exec")
        except SyntaxError:
            broken += 1
    left = [finding for finding in scan(temporary) if finding.fix is not None and finding.fix.safe]
    rows = [
        Row("5.23.0 safe fixes", str(len(safe))),
        Row("5.23.0 fixed files that do not parse", str(broken), "0", broken == 0),
        Row("5.23.0 safe fixes left after them", str(len(left)), "0", not left),
    ]
    if python is not None:
        fixed = {f.path for f in safe if f.rule in ("SR001", "SR003") and "/modeling_" in f.path}
        rows += built(python, root, temporary, sorted(fixed))
    return rows


def built(python: str, root: Path, copy: Path, modules: list[str]) -> Rows:
    """Compare the rotary classes of a fixed copy of transformers with the stock ones."""
    stock, fixed = tables(python, root, modules), tables(python, copy, modules)
    same = [name for name in stock if name in fixed and fixed[name]["plain"] == stock[name]["plain"]]
    survive = [name for name in same if fixed[name]["zero"] == stock[name]["plain"]]
    damaged = [name for name in stock if stock[name]["zero"] != stock[name]["plain"]]
    return [
        Row("5.23.0 fixed rotary classes built", str(len(stock))),
        Row("5.23.0   damaged by DeepSpeed's wrapper before the fix", str(len(damaged))),
        Row("5.23.0   same FP32 bits after the fix", str(len(same))),
        Row(
            "5.23.0   and the same under DeepSpeed's wrapper", str(len(survive)), ">= 30", len(survive) >= 30
        ),
        *(Row(f"  other FP32 bits: {name}") for name in sorted(stock.keys() - set(same))),
        *(Row(f"  not the same under it: {name}") for name in sorted(set(same) - set(survive))),
    ]


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
    digests: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return digests
