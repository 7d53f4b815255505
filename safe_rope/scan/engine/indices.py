"""Evidence that a tensor holds indices: whatever its dtype is called, it is then an integer one."""

from __future__ import annotations

import ast

from safe_rope.scan.engine import tensors
from safe_rope.scan.engine.file import File
from safe_rope.scan.engine.names import Argument
from safe_rope.scan.engine.scopes import Place, Scope, Site

# Functions and methods that take indices, and nothing else, as tensors beside the first.
_INDEXING = {
    "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select", "index_copy_",
    "index_add", "index_add_", "index_fill_", "take", "take_along_dim", "embedding", "one_hot",
}  # fmt: skip
_DEPTH = 3


def counts_in(file: File, site: Site, given: Argument) -> bool:
    """Say whether an arange in another tensor's dtype is an integer one: either is used as an index.

    Args:
        file: the file.
        site: the arange.
        given: its dtype, or the tensor that it is cast to.
    """
    return _indexes(file, site.node, site.ancestors, site.place) or holds(file, given.value, given.place)


def holds(file: File, node: ast.expr, place: Place, depth: int = 0) -> bool:
    """Say whether a tensor, or the one whose dtype this is, is somewhere used as an index."""
    if isinstance(node, ast.Attribute) and node.attr == "dtype":
        node = node.value
    while isinstance(node, ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Name) or depth > _DEPTH:
        return False
    if _is_used(file, place.scope, node.id):
        return True
    sources: list[tuple[ast.expr, Place]] = [
        (value, where) for value, where in file.names.values(node.id, place)
        if isinstance(value, ast.Attribute) and value.attr == "dtype"
    ]  # fmt: skip
    for one in file.names.bindings(node.id, place):
        if one.how == "parameter":
            given = file.inference.arguments(one.place.scope, one.parameter)
            sources += [(argument.value, argument.place) for argument in given]
    return any(holds(file, *source, depth + 1) for source in sources)


def _is_used(file: File, scope: Scope, name: str) -> bool:
    """Say whether a scope uses a variable as an index, or computes a page or a slot of it."""
    key = (id(scope), name)
    if key not in file.held:
        file.held[key] = any(
            _is_split(file, node, above, where) or _indexes(file, node, above, where)
            for node, above, where in file.flow.uses(scope, name)
        )
    return file.held[key]


def _is_split(file: File, node: ast.Name, ancestors: tuple[ast.AST, ...], place: Place) -> bool:
    """Say whether a page or a slot is computed from it: ``x // n`` or ``x % n``."""
    parent = ancestors[-1] if ancestors else None
    if not isinstance(parent, ast.BinOp) or parent.left is not node:
        return False
    return isinstance(parent.op, ast.FloorDiv | ast.Mod) and not file.value(parent.right, place).is_float


def _indexes(
    file: File, node: ast.expr, ancestors: tuple[ast.AST, ...], place: Place, depth: int = 0
) -> bool:
    """Say whether an expression, through views, sums and variables, ends as an index."""
    current: ast.AST = node
    for parent in reversed(ancestors):
        match parent:
            case ast.Subscript():
                if parent.slice is current:
                    return True
            case ast.Call():
                if any(argument is current for argument in parent.args):
                    name = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
                    return name in _INDEXING and (
                        isinstance(parent.func, ast.Attribute) or len(parent.args) > 1
                    )
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor() | ast.LShift() | ast.RShift()):
                return True
            case ast.Assign(targets=[ast.Name(id=target)]) if depth < _DEPTH:
                return _last_index(file, place.scope, target, depth + 1) > place.order
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()) | ast.Tuple() | ast.List() | ast.Slice():
                pass
            case ast.Attribute(attr=name) if name in tensors.KEPT:
                pass
            case ast.Attribute(attr="dtype") | ast.keyword(arg="dtype"):
                pass  # what has its dtype, and is an index, shows that it holds integers too
            case _:
                return False
        current = parent
    return False


def _last_index(file: File, scope: Scope, name: str, depth: int) -> int:
    """Return the order of the last statement that uses a variable of a scope as an index; -1 for none."""
    key = (id(scope), name, depth)
    if key not in file.indexed:
        uses = file.flow.uses(scope, name)
        file.indexed[key] = max((use[2].order for use in uses if _indexes(file, *use, depth)), default=-1)
    return file.indexed[key]
