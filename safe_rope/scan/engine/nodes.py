"""Nodes of a tree: what stands below one, is assigned to or taken as a parameter, what names one can make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

_CONVERSION = re.compile(r"%(?:\(\w+\))?[-#0 +]*[\d*]*(?:\.[\d*]+)?[a-zA-Z]")
_FIELD = re.compile(r"\{[^{}]*\}")


# Fields that hold no expression: most nodes have one, and reading them takes a fifth of a scan.
_PLAIN = {"arg", "attr", "ctx", "id", "kind", "level", "lineno", "module", "n", "op", "ops", "type_comment"}
# What fields hold that is no node.
NO_NODES = {type(None), str, int, bool}
_LEAVES = frozenset({*NO_NODES, ast.Constant})
_NAMELESS = _LEAVES | {ast.Name}


class _Fields(dict[type, tuple[str, ...]]):
    """The fields of a kind of node that can hold others."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        self[kind] = tuple(name for name in kind._fields if name not in _PLAIN)
        return self[kind]


FIELDS = _Fields({ast.Constant: ()})


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes right below one, but for contexts and operators."""
    below: list[ast.AST] = []
    for name in FIELDS[type(node)]:
        child: Any = getattr(node, name, None)
        kind = type(child)
        if kind is list:
            below += [item for item in child if type(item) not in NO_NODES]
        elif kind not in NO_NODES:
            below.append(child)
    return below


def within(statement: ast.AST, *, names: bool = True) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield the nodes of a statement but constants, each with those around it, from the statement inwards.

    Args:
        statement: or an expression.
        names: whether variables are among the nodes: they are half of them.
    """
    passed = _LEAVES if names else _NAMELESS
    stack: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(statement, ())]
    while stack:
        node, ancestors = stack.pop()
        yield node, ancestors
        around: tuple[ast.AST, ...] = ()
        for name in FIELDS[type(node)]:
            child: Any = getattr(node, name, None)
            kind = type(child)
            if kind is list:
                for item in child:
                    if type(item) not in passed:
                        around = around or (*ancestors, node)
                        stack.append((item, around))
            elif kind not in passed:
                around = around or (*ancestors, node)
                stack.append((child, around))


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to, or deletes."""
    match statement:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return targets
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return [target]
    return []


def parameters_of(function: ast.AST) -> list[ast.arg]:
    """Return the parameters of a function, a method or a lambda, without those that take any number."""
    some: ast.arguments = function.args  # type: ignore[attr-defined]
    return [*some.posonlyargs, *some.args, *some.kwonlyargs]


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
