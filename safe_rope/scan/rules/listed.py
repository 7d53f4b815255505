"""Lists of Python's numbers that a tensor is made of: those of which each is a power by a counted number."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from safe_rope.scan.engine import Binding, File, Place

_DEPTH = 3  # of variables and calls

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
        case (
            ast.ListComp(elt=made)
            | ast.GeneratorExp(elt=made)
            | ast.Call(func=ast.Name(id="map"), args=[ast.Lambda(body=made), _])
        ):
            yield made, place
        case (
            ast.Call(func=ast.Name(id="list" | "tuple" | "sorted" | "reversed"), args=[inner])
            | ast.List(elts=[ast.Starred(inner)])
            | ast.Subscript(value=inner, slice=ast.Slice())
        ):
            yield from _items(file, inner, place, depth + 1)
        case ast.List(elts=some) if depth:
            yield from ((one, place) for one in some)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
            yield from _items(file, left, place, depth + 1)
            yield from _items(file, right, place, depth + 1)
        case ast.Name(id=name):
            for one in _held(file, name, place):
                if one.how == "append" and one.value is not None:
                    yield one.value, one.place
                elif one.value is not None:
                    yield from _items(file, one.value, one.place, depth + 1)


def _held(file: File, name: str, place: Place) -> list[Binding]:
    """Return what a variable can hold at a use: what is bound to it, and what is put into that since."""
    scope = next((one for one in place.scope.upward() if name in one.bindings), None)
    if scope is None or (name, place.order) in place.scope.inner:  # what a comprehension takes
        return []
    held = [_summed(one, name) for one in scope.bindings[name]]
    for _, ancestors, at in file.flow.uses(scope, name):
        match ancestors[::-1]:
            case [ast.Attribute(attr="clear"), ast.Call(args=[]), ast.Expr()]:
                held.append(Binding("value", None, at))
            case [ast.Attribute(attr="append" | "extend" as attr), ast.Call(args=[one]) as call, *_]:
                held.append(_more(attr, one, at, call))
            case [ast.Subscript(slice=ast.Slice(None, None, None)), ast.Assign() | ast.Delete() as statement]:
                held.append(Binding("value", getattr(statement, "value", None), at))
    held.sort(key=lambda one: one.place.order)
    return file.names.reaching(held, place) if scope is place.scope else held


def _summed(one: Binding, name: str) -> Binding:
    """Return a binding, as one more list where it is the variable's sum with that."""
    match one.value:
        case ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=right) if left == name:
            return _more("extend", right, one.place, one.value)
    return one


def _more(how: str, value: ast.expr, place: Place, node: ast.AST) -> Binding:
    """Return what is put into a list: what the list held before, it holds still."""
    return Binding(how, value, Place(place.scope, place.order, (*place.path, (id(node), 1)), place.contexts))


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
    return any(one.how == "lambda" or (one.how == "item" and _is_range(file, one)) for one in some)


def _is_range(file: File, loop: Binding) -> bool:
    """Say whether a loop takes the numbers of a range, also enumerated or reversed."""
    node = loop.value
    if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") in ("enumerate", "reversed"):
        node = node.args[0]
    return isinstance(node, ast.Call) and file.names.qualify(node.func, loop.place) == "range"


def _is_power_of_two(file: File, node: ast.expr, place: Place) -> bool:
    constant = file.value(node, place).constant
    return constant is not None and abs(math.frexp(constant)[0]) == 0.5
