"""Executes what safe fixes change, before and after, with generated inputs; every result must keep its bits.

For each safe fix: the statement of the enclosing function that it changes, with the earlier statements that
define what it uses, run as a function of the names that are left. An annotated parameter is given what its
annotation says; any other name integers, fractions, complex numbers, tensors of each kind and objects with
such attributes. The default dtype is float32, and float64 too where the fix does not follow it (SR001).
Nothing but these statements runs. What no generated input gets through is counted as not executed.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from laboratory.scan_eval import slices
from laboratory.scan_eval.inputs import Anything, annotated
from safe_rope.scan.engine.finding import Finding, apply_edits
from safe_rope.scan.run.analyze import SourceError, analyze

TRIES = 60


def same(one: Any, other: Any, depth: int = 0) -> bool:
    """Say whether two results are equal to the bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        bits = [item.detach().contiguous().reshape(-1).view(torch.uint8) for item in (one, other)]
        return torch.equal(*bits)
    if depth > 4 or isinstance(one, Anything):
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other, itertools.repeat(depth + 1)))
    if isinstance(one, bool | int | float | complex | str | torch.dtype):
        return repr(one) == repr(other)
    return type(one) is type(other)


def run(
    code: Any,
    known: dict[str, Any],
    arguments: dict[str, Any],
    own: dict[str, ast.expr | None],
    seed: int,
    default: torch.dtype,
) -> Any:
    """Return what a slice records, or the exception that it raises."""
    draw, record = random.Random(seed), []  # type: ignore[var-annotated]
    values: dict[str, Any] = {
        name: annotated(name, annotation, draw, record) for name, annotation in arguments.items()
    }
    if "self" in values:
        values["self"] = Anything(draw, record, own)
    keep: list[Any] = []
    scope = {"__builtins__": slices.ALLOWED, **known, "__record__": keep.append}
    torch.manual_seed(0)
    numpy.random.seed(0)
    torch.set_default_dtype(default)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        exec(code, scope)
        scope["made"](**values)
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        torch.set_default_dtype(torch.float32)
    return keep, record


def judge(source: bytes, finding: Finding, *, pinned: bool) -> str:
    """Return "equal", "not executed", or what is wrong with a fix; ``pinned``: it follows no default."""
    assert finding.fix is not None
    after = apply_edits(source, finding.fix.edits)
    lines = {finding.line, *(source.count(b"\n", 0, edit.start) + 1 for edit in finding.fix.edits)}
    codes = []
    for text in (source, after):
        tree = ast.parse(text)
        found = slices.slice_of(tree, lines)
        if found is None:
            return "not executed"
        holder, statements = found
        Anything.holders = slices.holders_in(statements)
        # What a star of another file imports as torch is taken for it, as by the scanner.
        known = {"torch": torch, "math": math, **slices.constants(tree), **slices.imports(tree)}
        bound = set().union(*map(slices.assigned, statements))
        arguments: dict[str, ast.expr | None] = {}
        if isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = (*holder.args.posonlyargs, *holder.args.args, *holder.args.kwonlyargs)
            arguments = {one.arg: one.annotation for one in parameters}
        free = (
            set().union(*map(slices.read, statements))
            - known.keys()
            - slices.ALLOWED.keys()
            - bound
            - arguments.keys()
        )
        arguments |= dict.fromkeys(sorted(free))
        for name in slices.tensors_in(statements) & arguments.keys() - {"self"}:
            arguments[name] = arguments[name] or ast.Name("shaped")
        codes.append(
            (
                slices.runnable(statements, list(arguments)),
                known,
                arguments,
                slices.attributes(tree, finding.line),
            )
        )
    executed = False
    defaults = [torch.float32, torch.float64] if pinned else [torch.float32]
    for seed, default in itertools.product(range(8 * TRIES), defaults):
        if executed and seed >= TRIES:
            break
        before, changed = (run(*code, seed, default) for code in codes)
        if isinstance(before, Exception) or isinstance(changed, TimeoutError):
            continue
        executed = True
        if isinstance(changed, Exception) or not same(before, changed):
            what = changed if isinstance(changed, Exception) else "differs"
            return f"wrong with seed {seed} and {default}: {what}"
    return "equal" if executed else "not executed"


def is_pinned(finding: Finding, findings: list[Finding]) -> bool:
    """Say whether no edit of a fix is one of a call that follows the default dtype."""
    edits = {*finding.fix.edits} if finding.fix else set()
    joined = {one.rule for one in findings if one.fix and not edits.isdisjoint(one.fix.edits)}
    return joined == {"SR001"}


def sources(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the Python files below a folder."""
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(directory, name)
                if path.is_file():
                    yield str(path), path.read_bytes()


def timed_out(number: int, frame: Any) -> None:
    """Stop a slice that does not end."""
    raise TimeoutError


def execute(folders: list[Path]) -> int:
    """Judge every safe fix below the folders; print counts for each, and what is wrong."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, timed_out)
    torch.set_num_threads(1)
    torch.empty = torch.zeros  # type: ignore[assignment] # what memory holds that nothing has filled differs from run to run
    total: Counter[str] = Counter()
    equal: set[tuple[str, bytes]] = set()  # rules and lines, to tell copies of one edit
    for folder in folders:
        counts: Counter[str] = Counter()
        for path, source in sources(folder):
            try:
                findings = analyze(source, path)
            except SourceError:
                continue
            for finding in findings:
                if finding.fix is None or not finding.fix.safe:
                    continue
                verdict = judge(source, finding, pinned=is_pinned(finding, findings))
                counts[verdict.split(" with ")[0]] += 1
                if verdict == "equal":
                    lines = [
                        line.strip() for line in source.splitlines()[finding.line - 2 : finding.end_line + 1]
                    ]
                    equal.add((finding.rule, b"\n".join(lines)))
                if verdict != "equal":
                    print(f"{path}:{finding.line}: {finding.rule}: {verdict}", file=sys.stderr)
        total += counts
        print(json.dumps({"folder": folder.name, **counts}), flush=True)
    print(json.dumps({"folder": "all", **total, "equal, of different text": len(equal)}))
    return int(total["wrong"] > 0)
