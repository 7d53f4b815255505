"""Fractions: whether what a call is given may be none of the integers that an annotation asks for."""

from __future__ import annotations

import ast
from typing import Protocol

from safe_rope.scan.engine.names import Argument, Names
from safe_rope.scan.engine.scopes import Binding, Place, Scope
from safe_rope.scan.engine.tree import last
from safe_rope.scan.engine.values import Value
from safe_rope.scan.engine.walk import Walk

_FRACTION = ast.Constant(0.5)  # what stands for one that a name or an annotation promises
_MOST = 200  # expressions that one question looks at
# Functions and methods that give what they are given, or a part of it.
_PASS_ON = {
    "next", "iter", "min", "max", "list", "tuple", "set", "sorted", "reversed", "enumerate", "zip", "chain",
    "product", "abs", "get", "pop", "items", "values", "copy", "keys", "map", "reduce", "choice",
    "array", "asarray", "modf", "frexp",
}  # fmt: skip
# Those of numpy, random, statistics and operator that give fractions.
_GIVES = {
    "mean", "median", "sqrt", "linspace", "uniform", "random", "true_divide", "truediv", "float16", "float32",
    "float64",
}  # fmt: skip


class _Inference(Protocol):
    """What evaluates the expressions of a file."""

    walk: Walk
    names: Names

    def value(self, node: ast.expr, place: Place) -> Value: ...

    def arguments(self, scope: Scope, parameter: str) -> list[Argument]: ...

    def given_to_variables(self, position: int, parameter: str) -> list[Argument]: ...


class Fractions:
    """Looks for fractions in what an expression is made of, also by defaults, items and results.

    Args:
        inference: of the file.
    """

    def __init__(self, inference: _Inference) -> None:
        self._inference = inference

    def may_be(self, node: ast.expr, place: Place, *, given: bool = True) -> bool:
        """Say whether the file shows a fraction that an expression may be or hold, or too much to tell.

        ``given``: it surely is for a whole number, so that what another file computes may be a fraction.
        """
        waiting, seen = [(node, place)], {id(node)}
        for one in waiting:  # which grows
            value = self._inference.value(*one)
            if value.is_float or len(seen) > _MOST:
                return True
            if value.sort != "tensor" and (value.floating is not False or value.assumed):
                some = self._parts(*one) or (self._unknown(*one, value) if given else [])
                parts = [part for part in some if id(part[0]) not in seen]
                seen.update(id(part) for part, _ in parts)
                waiting += parts
        return False

    def _parts(self, node: ast.expr, place: Place) -> list[tuple[ast.expr, Place]]:
        """Return what an expression may be, may hold, or is computed from."""
        some: list[ast.expr] = []
        match node:
            case ast.BinOp(left=left, op=operation, right=right) if not isinstance(operation, ast.FloorDiv):
                some = [left, right]
            case ast.IfExp(body=left, orelse=right):
                some = [left, right]
            case ast.UnaryOp(operand=one) | ast.NamedExpr(value=one) | ast.Starred(value=one):
                some = [one]
            case ast.Subscript(value=one) | ast.ListComp(elt=one) | ast.GeneratorExp(elt=one):
                some = [one]
            case ast.BoolOp(values=some) | ast.Tuple(elts=some) | ast.List(elts=some) | ast.Set(elts=some):
                pass
            case ast.Dict(keys=keys, values=values):
                some = [*(key for key in keys if key is not None), *values]
            case ast.Lambda(body=one):
                some = [one]
            case ast.Name(id=name):
                return self._bound(self._inference.names.bindings(name, place))
            case ast.Attribute(value=of, attr=name):
                if name in ("truediv", "true_divide"):
                    return [(_FRACTION, place)]
                own = [(of, place)] if name == "value" else []  # of a member of an enumeration
                return own + self._of_classes(name) + self._returned(name, place)
            case ast.Call(func=function, args=given):
                name = getattr(function, "attr", getattr(function, "id", ""))
                if name in _GIVES and isinstance(function, ast.Attribute):
                    return [(_FRACTION, place)]
                if name not in _PASS_ON:
                    return self._returned(name, place)
                some = [*given, function.value] if isinstance(function, ast.Attribute) else given
        return [(one, place) for one in some]

    def _unknown(self, node: ast.expr, place: Place, value: Value) -> list[tuple[ast.expr, Place]]:
        """Return what gives an expression that nothing in the file makes: another object, or a fraction."""
        if value.floating is False:
            return []
        match node:
            case ast.Attribute(value=of):
                return [(of, place)]
            case ast.Call(func=function):
                module = self._inference.names.qualify(function, place).partition(".")[0] == "torch"
                return [] if module or last(function).endswith("int") else [(_FRACTION, place)]  # torch_int
        return []

    def _bound(self, bindings: list[Binding]) -> list[tuple[ast.expr, Place]]:
        parts = [(one.value, one.place) for one in bindings if one.value is not None]
        # A pattern or a context: ``*args`` stands before all else in a function, and a field is annotated.
        unseen = [one for one in bindings if one.value is None and one.how == "value" and not one.annotation]
        parts += [(_FRACTION, one.place) for one in unseen if one.place.order]
        for one in bindings:
            if one.how == "parameter":
                given = self._inference.arguments(one.place.scope, one.parameter)
                parts += [(argument.value, argument.place) for argument in given]
            elif one.how == "lambda":
                given = self._inference.given_to_variables(one.index[0], one.parameter)
                parts += [(argument.value, argument.place) for argument in given]
        return parts

    def _of_classes(self, name: str) -> list[tuple[ast.expr, Place]]:
        """Return what the classes of the file have by a name."""
        owners = self._inference.walk.classes.values()
        kept = [one for owner in owners for one in owner.attributes.get(name, ())]
        floats = [one for one in kept if getattr(one.annotation, "id", "") == "float"]
        return self._bound(kept) + [(_FRACTION, one.place) for one in floats]

    def _returned(self, name: str, place: Place) -> list[tuple[ast.expr, Place]]:
        """Return what the functions of a name return."""
        scopes = self._inference.walk.functions.get(name, ())
        floats = [one for one in scopes if getattr(getattr(one.node, "returns", None), "id", "") == "float"]
        parts = [part for scope in scopes for part in scope.returns]
        return parts + [(_FRACTION, place)] * bool(floats)
