"""The statements around a fix that are run: which they are, what they read, and as what they are compiled."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import torch

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
