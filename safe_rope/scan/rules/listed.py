"""Lists of Python's numbers that a tensor is made of: those of which each is a power by a counted number."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from safe_rope.scan.engine import File, Place

_DEPTH = 3  # of variables and calls
_ADDS = {"append": False, "extend": True}  # whether it is given a list

_Item = tuple[ast.expr, Place]


def are_powers(file: File, node: ast.expr, place: Place) -> bool:
    """Say whether an expression lists fractions that a number is raised to each of a range's numbers for."""
    return any(
        file.value(made, at).floating is True and any(_is_power(file, one, at) for one in ast.walk(made))
        for made, at in _items(file, node, place)
    )


def _items(file: File, node: ast.expr, place: Place, depth: int = 0) -> Iterator[_Item]:
    """Yield what is computed for each item of a list, by comprehensions, ``map``, loops and variables."""
    if depth > _DEPTH:
        return
    match node:
        case ast.ListComp(elt=made, generators=[ast.comprehension(ifs=[])]):
            yield made, place
        case ast.GeneratorExp(elt=made, generators=[ast.comprehension(ifs=[])]):
            yield made, place
        case ast.Call(func=ast.Name(id="map"), args=[ast.Lambda(body=made), _]):
            yield made, place
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner]) | ast.List(elts=[ast.Starred(inner)]):
            yield from _items(file, inner, place, depth + 1)
        case ast.Name(id=name):
            for value, at in file.names.values(name, place):
                match value:
                    case ast.List(elts=[]):
                        yield from _added(file, name, at, depth)
                    case _:
                        yield from _items(file, value, at, depth + 1)


def _added(file: File, name: str, place: Place, depth: int) -> Iterator[_Item]:
    """Yield what the scope adds to an empty list."""
    for statement, at in file.walk.statements:
        if at.scope is not place.scope:
            continue
        match statement:
            case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=attr), args=[one])):
                if of == name and attr in _ADDS:
                    yield from _items(file, one, at, depth + 1) if _ADDS[attr] else [(one, at)]
            case ast.AugAssign(target=ast.Name(id=of), value=ast.List(elts=[one])) if of == name:
                yield one, at


def _is_power(file: File, node: ast.AST, place: Place) -> bool:
    """Say whether a number is raised to what is made of a counted one, and bfloat16 may not hold it."""
    match node:
        case (
            ast.BinOp(left=base, op=ast.Pow(), right=exponent)
            | ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="pow"), args=[base, exponent])
        ):
            parts = [*ast.walk(exponent)]
            quotients = [one for one in parts if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)]
            numbers = [base, *(one.right for one in quotients)]
            exact = all(_is_power_of_two(file, one, place) for one in numbers)
            return any(_is_counted(file, part, place) for part in parts) and not exact
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="exp"), args=[exponent]):
            parts = [*ast.walk(exponent)]
            squared = any(isinstance(part, ast.Pow) for part in parts)  # as a Gaussian's is
            return not squared and sum(_is_counted(file, part, place) for part in parts) == 1
    return False


def _is_counted(file: File, node: ast.AST, place: Place) -> bool:
    """Say whether it is a variable that takes each number of a range, or a lambda's parameter."""
    if not isinstance(node, ast.Name):
        return False
    some = file.names.bindings(node.id, place)
    loops = [one for one in some if one.how == "item" and isinstance(one.value, ast.Call)]
    counted = [file.names.qualify(one.value.func, one.place) for one in loops]  # type: ignore[union-attr]
    return "range" in counted or any(one.how == "lambda" for one in some)


def _is_power_of_two(file: File, node: ast.expr, place: Place) -> bool:
    constant = file.value(node, place).constant
    return constant is not None and abs(math.frexp(constant)[0]) == 0.5
