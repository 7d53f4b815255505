"""In how many ways the rotary embedding is applied: the distinct bodies of the functions that apply it.

Two functions have the same body if they differ in nothing but their names, docstrings, annotations and
decorators. Reads source, imports nothing of what it reads.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROTATES = re.compile(r"apply_.*rot|apply_multidimensional_rope")
"""Names of the functions and methods that apply a rotary embedding."""


def body_of(function: Callable[..., Any]) -> str:
    """Return what names the body of a function: the same for all functions that share it."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    return _digest(definition)


def bodies(models: Path) -> dict[str, list[str]]:
    """Return every body in a folder of transformers' models, each with the functions that have it.

    Args:
        models: a folder of packages with files ``modeling_*.py`` for PyTorch.

    Returns:
        for each body the functions as ``package.function`` or ``package.class.method``.

    """
    found: dict[str, list[str]] = {}
    for path in sorted(models.glob("*/modeling_*.py")):
        if re.match(r"modeling_(tf|flax)_", path.name):
            continue
        for name, definition in _functions(ast.parse(path.read_text())):
            if ROTATES.search(definition.name):
                found.setdefault(_digest(definition), []).append(f"{path.parent.name}.{name}")
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{m.name}", m) for m in node.body if isinstance(m, ast.FunctionDef))


def _digest(definition: ast.FunctionDef) -> str:
    definition.name, definition.returns, definition.decorator_list = "f", None, []
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(ast.dump(definition).encode()).hexdigest()[:8]
