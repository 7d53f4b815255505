"""Run the tests of DeepSpeed's zero.Init and of transformers' models with an open guard, and without one.

The tests come from source checkouts, and run in processes that guard themselves as `safe-rope run` makes them
do, then in processes that do not. Printed is each test whose result differs. The exit status is 0 if there is
none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from _process import ToolError, free_port, run, say

LIMIT = None
SECONDS = 7200.0
"""For one suite, with the guard or without."""
SUITES = {
    "deepspeed": (
        "tests",
        tuple(
            f"unit/runtime/zero/test_zero_{name}.py"
            for name in ("context*", "dynamic_class", "late_module_attach", "leaf_module", "*_init")
        ),
    ),
    "transformers": (
        ".",
        (
            "tests/utils/test_modeling_rope_utils.py",
            *(
                f"tests/models/{name}/test_modeling_{name}.py"
                for name in ("llama", "gpt_neox", "mistral", "gemma3", "qwen2_vl", "esm")
            ),
        ),
    ),
}
"""Of each project: the folder that its tests are run in, and their files."""


def arguments(parser: argparse.ArgumentParser) -> None:
    for name in SUITES:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"a checkout of {name}")
    parser.add_argument("-k", dest="only", default="", metavar="TEXT", help="tests that pytest -k finds")


def main(options: argparse.Namespace) -> int:
    chosen = {name: getattr(options, name) for name in SUITES if getattr(options, name) is not None}
    if not chosen:
        raise ToolError("give a checkout: --deepspeed DIR, --transformers DIR")
    different = 0
    for name, checkout in chosen.items():
        folder, patterns = SUITES[name]
        where = checkout.resolve() / folder
        files = sorted(str(file.relative_to(where)) for pattern in patterns for file in where.glob(pattern))
        if not files:
            raise ToolError(f"expected a checkout of {name}, {checkout} has no {folder}/{patterns[0]}")
        seen = {}
        for way, environment in ways().items():
            say(f"{name}, {way}: {', '.join(files)} ...")
            seen[way] = results(where, files, options.only, environment)
        different += compare(name, seen)
    return 1 if different else 0


def ways() -> dict[str, dict[str, str]]:
    """Return the environment of a run without a guard, and of one with."""
    from safe_rope.integrations.options import Options

    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {"without": paths, "guarded": {**paths, **Options().environment(paths)}}


def results(where: Path, files: Sequence[str], only: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the outcome of each test, with the first line of what it says."""
    offline = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [*(["-k", only] if only else []), *files]
        with open(os.devnull, "w") as silence:
            run(
                command,
                cwd=where,
                env={**os.environ, **offline, **environment},
                limit=SECONDS,
                output=silence,
            )
        if not report.exists():
            raise ToolError(f"pytest made no report in {where}; run it there: {' '.join(command[1:])}")
        return read(report)


def read(report: Path) -> dict[str, str]:
    """Return the outcomes in a file of JUnit's format."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        told = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = told[0].tag if told else "passed"
        said = (told[0].get("message") or "").partition("\n")[0] if told else ""
        found[f"{case.get('classname')}::{case.get('name')}"] = f"{outcome} {said}".strip()
    return found


def compare(name: str, seen: Mapping[str, Mapping[str, str]]) -> int:
    """Print the tests whose outcome differs, and return how many there are."""
    without, guarded = seen["without"], seen["guarded"]
    different = 0
    for test in sorted(without.keys() | guarded.keys()):
        one, other = without.get(test, "did not run"), guarded.get(test, "did not run")
        if one.partition(" ")[0] != other.partition(" ")[0]:
            different += 1
            print(test, f"    without: {one}", f"    guarded: {other}", sep="\n")
    counts = Counter(outcome.partition(" ")[0] for outcome in guarded.values())
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"{name}: {len(guarded)} tests with a guard ({shown}); {different} differ from those without")
    return different
