"""Numbers: whether an expression is a whole number, a Python float, and how large it can be."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import replace

from safe_rope.scan.engine.evaluator import Evaluator
from safe_rope.scan.engine.scopes import Place
from safe_rope.scan.engine.values import FLOAT, INT, INT_BY_NAME, INTS, UNKNOWN, Value, assume, join, number
from safe_rope.scan.engine.vocabulary import KNOWN_INTEGERS

_INTEGER_CALLS = {
    "len", "int", "ord", "id", "hash", "math.ceil", "math.floor", "math.trunc", "math.gcd", "math.isqrt",
    "math.comb", "math.factorial", "math.lcm", "operator.index",
}  # fmt: skip
_FLOAT_CALLS = {
    "float", "math.log", "math.log2", "math.log10", "math.exp", "math.sqrt", "math.sin", "math.cos",
    "math.tan", "math.atan", "math.atan2", "math.radians", "math.fabs", "math.tanh", "math.log1p",
    "math.expm1", "math.pow", "math.acos", "math.acosh", "math.asin", "math.asinh", "math.atanh", "math.cbrt",
    "math.copysign", "math.cosh", "math.degrees", "math.dist", "math.erf", "math.erfc", "math.exp2",
    "math.fmod", "math.fsum", "math.gamma", "math.hypot", "math.ldexp", "math.lgamma", "math.nextafter",
    "math.remainder", "math.sinh", "math.ulp",
}  # fmt: skip
_INTEGER_METHODS = {
    "size", "numel", "dim", "nelement", "index", "count", "bit_length", "stride", "get_seq_length",
}  # fmt: skip
_OF_TENSORS = {"size", "numel", "nelement", "dim"}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_TO_INTEGERS = (ast.FloorDiv, ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor)


def known_integer(name: str) -> bool:
    """Say whether a configuration's field of this name is an integer."""
    return KNOWN_INTEGERS.fullmatch(name.lstrip("_")) is not None


def arithmetic(operation: ast.operator, left: Value, right: Value) -> Value:
    """Return what is known of an operation on two numbers."""
    constant = _fold(operation, left.constant, right.constant)
    if constant is not None:
        return number(constant)
    floating: bool | None = None
    if left.floating or right.floating or isinstance(operation, ast.Div):
        floating = True
    elif left.floating is False and right.floating is False:
        floating = False
    nominal = not (isinstance(operation, ast.Div) or left.is_proven_float or right.is_proven_float)
    keeps = isinstance(operation, ast.Add | ast.Sub | ast.Mult | ast.Mod) or (
        isinstance(operation, ast.Pow) and right.constant is not None and right.constant >= 0
    )
    whole = isinstance(operation, _TO_INTEGERS) or (keeps and left.whole and right.whole)
    bound = None
    if isinstance(operation, ast.Mod) and right.bound:
        bound = right.bound
    elif left.bound is not None and right.bound is not None:
        if isinstance(operation, ast.Mult):
            bound = left.bound * right.bound
        elif isinstance(operation, ast.Add | ast.Sub):
            bound = left.bound + right.bound
    assumed = left.assumed or right.assumed or {left.sort, right.sort} != {"number"}
    nominal = nominal and floating is True
    return Value("number", whole or None, floating, bound=bound, assumed=assumed, nominal=nominal)


def _fold(operation: ast.operator, left: int | float | None, right: int | float | None) -> int | float | None:
    if left is None or right is None:
        return None
    try:
        if isinstance(operation, ast.Pow):
            if abs(right) > 64 or abs(left) > 1e9:
                return None
            power = left**right
            return power if isinstance(power, int | float) else None
        function = _ARITHMETIC.get(type(operation))
        result = None if function is None else function(left, right)
        return result if result is None or math.isfinite(result) else None
    except (ArithmeticError, ValueError):
        return None


def of_call(evaluator: Evaluator, node: ast.Call, function: str, place: Place) -> Value:
    """Return what is known of a call's result, if it is a number."""
    first = node.args[0] if node.args else None
    if function in ("int", "float") and first is not None:
        inner = evaluator.value(first, place)
        if function == "float":
            return Value("number", inner.whole, True, bound=inner.bound, assumed=inner.assumed)
        return INT if inner.constant is None else number(int(inner.constant))
    if function in _INTEGER_CALLS or (function == "round" and len(node.args) == 1 and not node.keywords):
        return INT
    if function in _FLOAT_CALLS:
        return FLOAT
    if function == "round" and first is not None:  # to so many places
        return replace(evaluator.value(first, place), constant=None)
    if function == "range":
        return INTS
    if function in ("list", "tuple", "sorted") and first is not None:
        items = evaluator.value(first, place)
        if items.sort != "numbers":
            return UNKNOWN
        return items if function == "tuple" else assume(items)  # a list can be changed in place
    if function in ("max", "min", "abs", "sum", "pow") and node.args and not node.keywords:
        return _builtin(evaluator, node, function, place)
    if function == "getattr" and len(node.args) >= 2:
        return _field(node.args[1])
    if isinstance(node.func, ast.Attribute):
        name = node.func.attr
        # An object that has such a method, and is no tensor.
        other = getattr(node.func.value, "id", "") in ("self", "cls") or evaluator.defines(name)
        if name == "size" and not node.args and not node.keywords:
            return assume(INTS) if other else INTS
        if name in _INTEGER_METHODS and function != "itertools.count":
            return INT if name in _OF_TENSORS and not other else INT_BY_NAME
        if name in ("item", "tolist"):
            of = evaluator.value(node.func.value, place)
            return Value(
                "number" if name == "item" else "numbers", of.whole, assumed=of.assumed or of.whole is None
            )
        if name in ("get", "pop") and first is not None:
            return _field(first)
    return UNKNOWN


def _field(node: ast.expr) -> Value:
    """Return what is known of a field that is asked for by name."""
    return INT_BY_NAME if isinstance(node, ast.Constant) and known_integer(str(node.value)) else UNKNOWN


def _builtin(evaluator: Evaluator, node: ast.Call, function: str, place: Place) -> Value:
    arguments = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    values = [evaluator.value(argument, place) for argument in arguments]
    if function == "pow" and len(values) == 2:
        return arithmetic(ast.Pow(), values[0], values[1])
    if len(values) == 1:
        value = values[0]
        if function == "abs":
            return value
        known = value.sort == "numbers"
        nominal = value.nominal or function == "sum"  # of nothing it is an int
        return replace(value, sort="number", nominal=nominal, bound=None) if known else UNKNOWN
    if function not in ("max", "min") or len(arguments) != len(node.args):
        return UNKNOWN
    result = join(values)
    bounds = [value.constant for value in values if value.constant is not None]
    floating = any(value.floating for value in values) or result.floating
    bound = min(bounds) if function == "min" and bounds else result.bound
    assumed = result.assumed or result.sort != "number"
    nominal = not all(value.is_proven_float for value in values)
    return Value("number", result.whole, floating, bound=bound, assumed=assumed, nominal=nominal)
