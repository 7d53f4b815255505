"""Executes what safe fixes change, before and after, with generated inputs; every result must keep its bits.

For each safe fix: the statement of the enclosing function that it changes, with the earlier statements that
define what it uses, run as a function of the names that are left. An annotated parameter is given what its
annotation says; any other name integers, fractions, complex numbers, tensors of each kind and objects with
such attributes. The default dtype is float32, and float64 too where the fix does not follow it (SR001).
Nothing but these statements runs. What no generated input gets through is counted as not executed.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import torch

from safe_rope.scan.engine.finding import Finding, apply_edits
from safe_rope.scan.run.analyze import SourceError, analyze

TRIES = 60
TENSOR_ATTRIBUTES = {"shape", "size", "device", "dtype", "ndim", "new_zeros", "unsqueeze", "view", "reshape"}


def kept(tensor: Any, *arguments: Any, **named: Any) -> Any:
    """Stand in for einops: the shape is nothing to a dtype."""
    return tensor


MODULES = {
    "torch": torch,
    "math": math,
    "numpy": numpy,
    "torch.nn": torch.nn,
    "einops": SimpleNamespace(rearrange=kept, repeat=kept),
}
ALLOWED = {
    name: getattr(builtins, name)
    for name in (
        "abs", "all", "any", "bool", "complex", "dict", "enumerate", "filter", "float", "getattr", "hasattr",
        "int", "isinstance", "len", "list", "locals", "map", "max", "min", "object", "pow", "property",
        "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "type", "zip",
        "AssertionError", "Exception", "IndexError", "KeyError", "NotImplementedError", "RuntimeError",
        "TypeError", "ValueError",
    )
} | {
    "print": lambda *arguments, **named: None,
    "__import__": lambda name, *rest: __import__(name, *rest) if name in MODULES else nothing(name),
}  # fmt: skip


def nothing(name: str) -> Any:
    """Refuse to import it."""
    raise ImportError(name)


def shaped(draw: random.Random) -> torch.Tensor:
    """Return a tensor of any rank and kind."""
    shape = [draw.choice((1, 2, 6)) for _ in range(draw.choice((1, 2, 3, 4, 5)))]
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)
    return torch.arange(math.prod(shape)).view(shape).to(draw.choice(kinds))


def tensors_in(statements: list[ast.stmt]) -> set[str]:
    """Return the names that are used as tensors are."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    of = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in TENSOR_ATTRIBUTES]
    of += [node.value for node in nodes if isinstance(node, ast.Subscript)]
    return {node.id for node in of if isinstance(node, ast.Name)}


def holders_in(statements: list[ast.stmt]) -> set[str]:
    """Return the names of attributes that are asked for fields, as a part of a configuration is."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    of = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "get"]
    of += [
        node.value
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant | ast.Name)
    ]
    return {node.attr for node in of if isinstance(node, ast.Attribute)}


class Anything:
    """An object whose attributes, items and results are generated; what it is called with is recorded."""

    holders: ClassVar[set[str]] = set()  # names of attributes that are such objects themselves

    def __init__(
        self, draw: random.Random, record: list[Any], known: dict[str, ast.expr | None] | None = None
    ) -> None:
        self.__dict__.update(_draw=draw, _record=record, _known=known or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        annotation = self._known.get(name)
        whole = annotation is not None and "int" in re.findall(r"\w+", ast.unparse(annotation))
        if name in self.holders and not whole and self._draw.random() < 0.5:
            value: Any = Anything(self._draw, self._record)
        elif name in self._known:
            value = annotated(name, self._known[name], self._draw, self._record)
        else:
            value = drawn(self._draw, self._record)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self._record.append((name, value))

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, f"item_{key}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._record.append((arguments, sorted(named.items())))
        return drawn(self._draw, self._record)


def drawn(draw: random.Random, record: list[Any]) -> Any:
    """Return a value of a random kind."""
    kinds = [
        lambda: draw.choice((1, 2, 6, 64, 300)),
        lambda: draw.choice((1, 2, 6, 64, 300)),
        lambda: draw.choice((0.5, 10.5, 1e4)),
        lambda: float(draw.choice((2, 12, 320))),
        lambda: complex(1, draw.choice((0.5, 2))),
        lambda: torch.linspace(-2, 3, 6).view(2, 3).to(draw.choice((torch.float32, torch.float64))),
        lambda: torch.rand(6, generator=torch.Generator().manual_seed(1)).to(
            draw.choice((torch.bfloat16, torch.float16, torch.float64, torch.complex64))
        ),
        lambda: torch.tensor(draw.choice((6.0, 7.5)), dtype=draw.choice((torch.float32, torch.float64))),
        lambda: torch.tensor([[1, 2, 3], [4, 5, 6]]),
        lambda: draw.choice((torch.float32, torch.bfloat16, torch.float64, torch.int64)),
        lambda: (draw.choice((1, 2, 6, 14)), draw.choice((1, 3, 6))),
        lambda: torch.device("cpu"),
        lambda: None,
        lambda: Anything(draw, record),
    ]
    made: Any = draw.choice(kinds)()  # type: ignore[no-untyped-call]
    return made


def annotated(name: str, annotation: ast.expr | None, draw: random.Random, record: list[Any]) -> Any:
    """Return a value of the annotated type, or any; what is called a device or dtype is mostly one."""
    if draw.random() < 0.9 and name.endswith("device"):
        return draw.choice((torch.device("cpu"), None))
    if draw.random() < 0.9 and name.endswith("dtype"):
        return draw.choice((torch.float32, torch.bfloat16, torch.float64, torch.int64, None))
    if draw.random() < 0.9 and name in ("self", "config", "cfg", "args"):
        return Anything(draw, record)
    text = "" if annotation is None else ast.unparse(annotation)
    if text == "shaped" and draw.random() < 0.7:
        return shaped(draw)
    if text == "never":
        raise NotImplementedError(name)
    words = set(text.replace("Optional[", "").replace("]", "").replace(" ", "").split("|")) - {"None"}
    if words == {"int"}:
        return draw.choice((1, 2, 6, 64, 300, 4097))
    parts = set(re.findall(r"\w+", text)) - {"Optional", "None"}
    if "int" in parts and parts <= {"int", "list", "tuple", "List", "Tuple", "Sequence"}:
        size = (
            text.count("int")
            if "..." not in text and text.lower().startswith("tuple")
            else draw.choice((2, 3))
        )
        return tuple(draw.choice((1, 2, 6, 14)) for _ in range(size))
    if words == {"float"}:
        return draw.choice((0.5, 1e4, 2.0))
    if words == {"bool"}:
        return draw.random() < 0.5
    if words and words <= {"Tensor", "torch.Tensor"}:
        return shaped(draw)
    return drawn(draw, record)


def attributes(tree: ast.Module, line: int) -> dict[str, ast.expr | None]:
    """Return how the class around a line, and its bases there, annotate what they assign to self.

    An expression of more than a parameter or a literal is given no annotation but that of a failure.
    """
    found: dict[str, ast.expr | None] = {}
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    chain = [node for node in classes.values() if node.lineno <= line <= (node.end_lineno or 0)]
    for around in chain:
        bases = (classes.get(getattr(base, "id", "")) for base in around.bases)
        chain += [base for base in bases if base is not None and base not in chain]
    for around in reversed(chain):
        for method in (node for node in around.body if isinstance(node, ast.FunctionDef)):
            known = {one.arg: one.annotation for one in (*method.args.args, *method.args.kwonlyargs)}
            for node in ast.walk(method):
                if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
                    continue
                value = node.value
                known_type = type(value.value).__name__ if isinstance(value, ast.Constant) else "never"
                kind: ast.expr | None = ast.Name(known_type)
                found[node.targets[0].attr] = known.get(getattr(node.value, "id", ""), kind)
    return found


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Module]:
    """Yield the module and every function, inner ones last."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def assigned(node: ast.AST) -> set[str]:
    """Return the names that a statement binds."""
    stored = {
        one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    defined = {one.name for one in ast.walk(node) if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    return stored | defined


def read(node: ast.AST) -> set[str]:
    """Return the names that a statement reads."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def slice_of(tree: ast.Module, lines: set[int]) -> tuple[ast.AST, list[ast.stmt]] | None:
    """Return the innermost function around the lines and the statements in it to run."""
    holder: ast.AST = tree
    for function in functions(tree):
        first, last = getattr(function, "lineno", 0), getattr(function, "end_lineno", 10**9)
        inside = not isinstance(function, ast.Module) and function.body[0].lineno <= min(lines)
        if inside and first <= min(lines) and max(lines) <= last:
            holder = function
    body: list[ast.stmt] = holder.body  # type: ignore[attr-defined]
    touched = [
        n for n, one in enumerate(body) if any(one.lineno <= line <= (one.end_lineno or 0) for line in lines)
    ]
    if not touched or any(isinstance(body[n], ast.ClassDef | ast.FunctionDef) for n in touched):
        return None
    chosen = set(touched)
    needed = set().union(*(read(body[n]) for n in touched))
    for number in range(max(touched), -1, -1):
        statement = body[number]
        if number in chosen or (
            not isinstance(statement, ast.ClassDef) and assigned(statement) & needed and number < max(touched)
        ):
            chosen.add(number)
            needed |= read(statement)
    return holder, [body[number] for number in sorted(chosen)]


class Returns(ast.NodeTransformer):
    """Makes every return a record of what it returns; inner functions keep theirs."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """Record the value, then return."""
        value = node.value or ast.Constant(None)
        call = ast.Call(ast.Name("__record__", ast.Load()), [value], [])
        return ast.copy_location(ast.Return(call), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leave it as it is."""
        return node

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # type: ignore[assignment] # noqa: N815


def runnable(statements: list[ast.stmt], names: list[str]) -> Any:
    """Compile statements into a function of names that records what it returns and what it binds."""
    made = ast.parse(f"def made({', '.join(names)}):\n    pass\n")
    # Parsed anew: the transformer changes in place.
    body = [Returns().visit(ast.parse(ast.unparse(statement)).body[0]) for statement in statements]
    made.body[0].body = [*body, ast.parse("__record__(dict(locals()))").body[0]]  # type: ignore[attr-defined]
    return compile(ast.fix_missing_locations(made), "slice", "exec")


def imports(tree: ast.Module) -> dict[str, Any]:
    """Return what the module imports of torch, math and numpy."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.split(".")[0]
                if top in MODULES:
                    found[alias.asname or top] = MODULES[top]
                elif top == "torch.nn.functional":
                    found[alias.asname or top] = torch.nn.functional
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                if hasattr(MODULES[node.module], alias.name):
                    found[alias.asname or alias.name] = getattr(MODULES[node.module], alias.name)
    return found


def constants(tree: ast.Module) -> dict[str, Any]:
    """Return the module's constants."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


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
    scope = {"__builtins__": ALLOWED, **known, "__record__": keep.append}
    torch.manual_seed(0)
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


def judge(source: bytes, finding: Finding) -> str:
    """Return "equal", "not executed", or what is wrong with a fix."""
    assert finding.fix is not None
    after = apply_edits(source, finding.fix.edits)
    lines = {finding.line, *(source.count(b"\n", 0, edit.start) + 1 for edit in finding.fix.edits)}
    codes = []
    for text in (source, after):
        tree = ast.parse(text)
        found = slice_of(tree, lines)
        if found is None:
            return "not executed"
        holder, statements = found
        Anything.holders = holders_in(statements)
        known = {**constants(tree), **imports(tree)}
        bound = set().union(*map(assigned, statements))
        arguments: dict[str, ast.expr | None] = {}
        if isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = (*holder.args.posonlyargs, *holder.args.args, *holder.args.kwonlyargs)
            arguments = {one.arg: one.annotation for one in parameters}
        free = set().union(*map(read, statements)) - known.keys() - ALLOWED.keys() - bound - arguments.keys()
        arguments |= dict.fromkeys(sorted(free))
        for name in tensors_in(statements) & arguments.keys() - {"self"}:
            arguments[name] = arguments[name] or ast.Name("shaped")
        codes.append(
            (runnable(statements, list(arguments)), known, arguments, attributes(tree, finding.line))
        )
    executed = False
    defaults = [torch.float32, torch.float64] if finding.rule == "SR001" else [torch.float32]
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
                verdict = judge(source, finding)
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
