"""Nodes of a tree: what stands below one, what a statement assigns to, what names an expression can make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_CONVERSION = re.compile(r"%(?:\(\w+\))?[-#0 +]*[\d*]*(?:\.[\d*]+)?[a-zA-Z]")
_FIELD = re.compile(r"\{[^{}]*\}")


# Fields that hold no expression: most nodes have one, and reading them takes a fifth of a scan.
_PLAIN = {"arg", "attr", "ctx", "id", "kind", "level", "lineno", "module", "n", "op", "ops", "type_comment"}
_FIELDS: dict[type, tuple[str, ...]] = {}


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes right below one, but for contexts and operators."""
    kind = type(node)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(name for name in kind._fields if name not in _PLAIN)
    below: list[ast.AST] = []
    for name in _FIELDS[kind]:
        child = getattr(node, name, None)
        if isinstance(child, list):
            below += [item for item in child if isinstance(item, ast.AST)]
        elif isinstance(child, ast.AST):
            below.append(child)
    return below


def within(statement: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield the nodes of a statement but constants, each with those around it, from the statement inwards."""
    stack: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(statement, ())]
    while stack:
        node, ancestors = stack.pop()
        yield node, ancestors
        kind = type(node)
        if kind not in _FIELDS:
            _FIELDS[kind] = tuple(name for name in kind._fields if name not in _PLAIN)
        names = _FIELDS[kind]
        below = (*ancestors, node) if names else ()
        for name in names:
            child = getattr(node, name, None)
            if isinstance(child, list):
                stack += [(item, below) for item in child if isinstance(item, ast.AST)]
            elif isinstance(child, ast.AST) and not isinstance(child, ast.Constant):
                stack.append((child, below))


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to, or deletes."""
    match statement:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return targets
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return [target]
    return []


def pattern(name: ast.expr) -> str:
    """Return a regular expression of the names that an expression can make."""
    match name:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern(part) for part in parts)
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
            return r"\w*".join(map(re.escape, _CONVERSION.split(text)))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return pattern(left) + pattern(right)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return r"\w*".join(map(re.escape, _FIELD.split(text)))
    return r"\w*"
