"""Environments that users have, one after another: made, tested, recorded and removed. Standard library only.

``requirements/wide.txt`` lists them. The record has a line of JSON for each, shown in docs/releases.md; what
stands there and failed in nothing is left out the next time. Tested is what a release can change: most of
what is marked ``contract`` or ``torch``, two minutes of a core; the packages take as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from _environment import BUILD_HELPER, BUILD_REQUIREMENTS, LIMIT, PIP, REQUIREMENTS, ROOT, variables
from _process import ToolError, end_running, run, say

TABLE = REQUIREMENTS / "wide.txt"
RECORD = ROOT / "docs" / "data" / "releases.jsonl"
PAGE = ROOT / "docs" / "releases.md"
SETTLED = ("passed", "refused")
MARK = "<!-- tools/lab matrix --wide -->\n"
NEWEST = ["torch", "transformers", "deepspeed", "numpy", "accelerate", "peft", "matplotlib"]
BESIDE = ("accelerate", "peft", "matplotlib", "kernels", "triton")
NAMED = ("torch", "transformers", "deepspeed", "numpy")
TESTING = ("hypothesis", "mpmath", "pytest", "pytest-timeout", "pytest-xdist")
NEEDED = ("wrapt", "click", "rich", "tomli", *TESTING)
LEFT_OUT = (
    "tests/autocast/test_two_ranks.py",
    "tests/cli",
    "tests/constructors/test_parameter_dtypes.py",
    "tests/integrations/test_run.py",
    "tests/system/load_paths/test_imports.py",
    "tests/system/ranks",
    "tests/system/zoo",
)
"""What takes longest of all that is marked, and is told by the rest or by a survey."""
GRAPHS = "test_one_graph_gives_the_eager_logits[{}-exact]"
PROBE = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
import safe_rope
try:
    with safe_rope.guard():
        from safe_rope.integrations import SafeRopeCallback
        import transformers, deepspeed
except safe_rope.SafeRopeError as error:
    print(error)
    sys.exit(3)
"""
Row = dict[str, Any]


def wide(chosen: Sequence[str], again: bool, jobs: int) -> int:
    """Try every environment of the list that is not recorded as one that works or is refused.

    Args:
        chosen: words of the list's lines; only lines that have one of them are tried.
        again: also those that are recorded.
        jobs: how many processes share the tests.

    """
    rows = {row["line"]: row for row in recorded()}
    words = {word for line in listed() for word in line.split()}
    if unknown := sorted(set(chosen) - words):
        raise ToolError(f"no line of {TABLE.relative_to(ROOT)} has {unknown[0]!r}; choose words of its lines")
    lines = [line for line in listed() if not chosen or set(chosen) & set(line.split())]
    settled = {line for line in rows if not again and rows[line]["outcome"] in SETTLED}
    for line in settled.intersection(lines):
        print(summary(rows[line]), flush=True)
    for line, row in tried([line for line in lines if line not in settled], jobs):
        rows[line] = {"line": line} | row
        write([rows[name] for name in listed() if name in rows])
        print(summary(row), flush=True)
    return int(any(rows.get(line, {}).get("outcome") not in SETTLED for line in lines))


def newest(jobs: int) -> int:
    """Try whatever is newest on the index, with this Python; nothing is recorded."""
    version = ".".join(map(str, sys.version_info[:2]))
    row = next((row for _, row in tried([" ".join([version, *NEWEST])], jobs)), None)
    if row is None:
        return 2
    print(summary(row))
    return int(row["outcome"] != "passed")


def listed() -> list[str]:
    lines = TABLE.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def recorded() -> list[Row]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def write(rows: list[Row]) -> None:
    """Write the record, and the table of the page that shows it."""
    RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, _, rest = PAGE.read_text().partition(MARK)
    PAGE.write_text(before + MARK + table(rows) + MARK + rest.partition(MARK)[2])


@dataclass(frozen=True)
class Wanted:
    """What a line of the list asks for, and where it is made."""

    line: str

    @property
    def python(self) -> str:
        return self.line.split()[0]

    @property
    def threads(self) -> bool:
        return "threads" in self.line.split()

    @property
    def taken(self) -> list[str]:
        return [word[1:] for word in self.line.split() if word.startswith("-")]

    @property
    def packages(self) -> list[str]:
        return [word for word in self.line.split()[1:] if word != "threads" and not word.startswith("-")]

    @property
    def folder(self) -> Path:
        main = Path(os.environ.get("SAFE_ROPE_VENV") or ROOT / ".venv").absolute()
        return main.with_name("-".join([main.name, "wide", self.python, *self.packages[:2]]))

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def tried(lines: Sequence[str], jobs: int) -> Iterator[tuple[str, Row]]:
    """Make each environment, find out how the library does in it, remove it; leave out what cannot be made.

    While one is tested the next is made: pip mostly waits.
    """
    wanted = [Wanted(line) for line in lines]
    with contextlib.ExitStack() as held:
        for one in wanted:
            held.callback(shutil.rmtree, one.folder, ignore_errors=True)
        maker = held.enter_context(ThreadPoolExecutor(1))
        held.callback(end_running)
        making = (maker.submit(make, one) for one in wanted)
        coming = next(making, None)
        for one in wanted:
            assert coming is not None
            wait([coming])
            made, coming = coming, next(making, None)
            began = time.monotonic()
            try:
                seconds = made.result()
                with one.log.open("a") as output:
                    row = measured(one, output, jobs)
            except ToolError as error:
                say(f"{one.line}: {error} (log: {one.log})")
            else:
                yield one.line, row | {"seconds": round(seconds + time.monotonic() - began)}
            shutil.rmtree(one.folder, ignore_errors=True)


def interpreter(version: str) -> str:
    """Return a Python of this version: one on PATH, or one that pyenv has made."""
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for python in (shutil.which(f"python{version}"), *map(str, installed)):
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        if (
            python
            and subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout == version + "\n"
        ):
            return python
    raise ToolError(f"found no Python {version}, on PATH or among pyenv's; install one")


def make(one: Wanted) -> float:
    """Make an environment; return the seconds that it took."""
    began = time.monotonic()
    inside = one.folder / "bin" / "python"
    pip: list[str | Path] = [inside, *PIP, "--no-cache-dir"]
    first = [word for word in one.packages if word.startswith(("torch", "numpy"))]
    shutil.rmtree(one.folder, ignore_errors=True)
    commands: list[list[str | Path]] = [
        [interpreter(one.python), "-m", "venv", one.folder],
        [*pip, "-r", BUILD_REQUIREMENTS, *first],
        # DeepSpeed is built from source and must see the torch that is installed.
        [*pip, "--no-build-isolation", *one.packages, *NEEDED],
        [*pip, "--no-build-isolation", "--no-deps", "-e", ROOT],
    ]
    if one.taken:
        commands.insert(3, [inside, "-m", "pip", "uninstall", "-y", *one.taken])
    with one.log.open("w") as output:
        for command in commands:
            if run(command, env=variables(one.folder), cwd=one.folder.parent, limit=LIMIT, output=output):
                raise ToolError(f"{' '.join(map(str, command[1:]))[:90]} ... failed")
        # Where it cannot be built, DeepSpeed says so and does without.
        helper: list[str | Path] = [inside, "-c", BUILD_HELPER]
        run(helper, env=variables(one.folder), cwd=one.folder, limit=LIMIT, output=output)
    return time.monotonic() - began


def measured(one: Wanted, output: Any, jobs: int) -> Row:
    """Return the versions that are there, and that the library refuses them or what tests and demo say."""
    folder = one.folder
    inside = str(folder / "bin" / "python")
    environment = variables(folder)
    if one.threads:
        del environment["OMP_NUM_THREADS"]
    probe = subprocess.run(
        [inside, "-W", "ignore", "-c", PROBE, *NAMED, *BESIDE],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(probe.stdout, probe.stderr, file=output, flush=True)
    row: Row = {"versions": json.loads(probe.stdout.partition("\n")[0]), "threads": one.threads}
    if probe.returncode:
        said = (
            probe.stdout.rstrip().splitlines()[-1] if probe.returncode == 3 else probe.stderr.splitlines()[-1]
        )
        return row | {"outcome": "refused" if probe.returncode == 3 else "failed", "reason": said}
    reports = []
    # One run for each mark: what a compiler keeps alive is nothing for tests of what is gone.
    for mark in ("contract", "torch and not contract"):
        reports.append(folder / f"{mark}.xml")
        tests = ["-m", "pytest", "-v", "-n", str(jobs), "--dist", "loadfile"]
        tests += ["-p", "no:cacheprovider", "-m", mark]
        tests += [f"--junit-xml={reports[-1]}", *(f"--ignore={path}" for path in LEFT_OUT)]
        run([inside, *tests], env=environment, cwd=ROOT, limit=LIMIT, output=output)
    row |= outcomes(reports)
    shown = folder / "demo.json"
    with shown.open("w") as file:
        path = {"PYTHONPATH": str(ROOT / "tools")}
        command = [inside, "-W", "ignore", "-m", "laboratory", "demo", "--format", "json"]
        done = subprocess.run(
            command, env=environment | path, cwd=ROOT, stdout=file, stderr=output, timeout=LIMIT
        )
    if done.returncode:
        row["outcome"] = "failed"
        row.setdefault("failed", []).append("tools/demo")
    rows = json.loads(shown.read_text() or '{"rows": []}')["rows"]
    worst = {kind: [one[kind]["cos_error"] for one in rows if kind in one] for kind in ("stock", "guarded")}
    return row | {"demo": {kind: float(f"{max(errors):.2g}") for kind, errors in worst.items() if errors}}


def outcomes(reports: list[Path]) -> Row:
    """Return what pytest's reports say: how many passed, why others were skipped, which failed."""
    passed, skipped, failed, graphs = 0, Counter[str](), [], {}
    for case in (case for report in reports for case in cases(report)):
        name = str(case.get("name"))
        ended = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        how = "passed" if ended is None else ended.tag
        for family in ("llama", "gpt_neox"):
            if name == GRAPHS.format(family):
                graphs[family] = how
        if ended is None:
            passed += 1
        elif how == "skipped":
            skipped[str(ended.get("message"))] += 1
        else:
            failed.append(f"{case.get('classname')}::{name}")
    row: Row = {"outcome": "failed" if failed or not passed else "passed", "passed": passed, "graphs": graphs}
    return row | {"skipped": dict(skipped)} | ({"failed": failed} if failed else {})


def cases(report: Path) -> list[ElementTree.Element]:
    if not report.exists():
        raise ToolError("pytest ended without a report")
    return list(ElementTree.parse(report).iter("testcase"))


def summary(row: Row) -> str:
    """Return one line that says what was tried and how it ended."""
    versions = " ".join(f"{name} {row['versions'].get(name, '-')}" for name in ("python", *NAMED))
    if "passed" not in row:
        return f"{versions}: {row['outcome']}: {row.get('reason', '')}"
    counts = (
        f"{row['passed']} passed, {len(row.get('failed', ()))} failed, {sum(row['skipped'].values())} skipped"
    )
    return f"{versions}: {row['outcome']}, {counts}, {row['seconds']} s"


def table(rows: list[Row]) -> str:
    """Return the page's table, in Markdown."""
    heads = ["Python", *NAMED, "beside", "tests", "one graph", "cos, sin: stock", "guarded"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        versions = row["versions"]
        cells = [versions.get(name, "-") for name in ("python", *NAMED)]
        beside = [name for name in BESIDE if name in versions] + ["threads"] * row["threads"]
        if "passed" in row:
            failed, skipped = len(row.get("failed", ())), sum(row["skipped"].values())
            tests = f"{row['passed']} passed" + f", {failed} failed" * bool(failed) + f", {skipped} skipped"
            graphs = (
                "yes"
                if set(row["graphs"].values()) == {"passed"}
                else ", ".join(f"{family} {how}" for family, how in row["graphs"].items())
            )
            errors = [f"{row['demo'].get(kind, float('nan')):.1e}" for kind in ("stock", "guarded")]
            cells += [", ".join(beside), tests, graphs, *errors]
        else:
            cells += [", ".join(beside), f"{row['outcome']}: {row.get('reason', '')}", "", "", ""]
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
