"""Tensors: which dtype an operation gives, and whether its values are whole numbers."""

from __future__ import annotations

import ast
from dataclasses import replace

from safe_rope.scan.engine.evaluator import Evaluator
from safe_rope.scan.engine.names import Argument, Call
from safe_rope.scan.engine.scopes import Place
from safe_rope.scan.engine.values import FLOATING, UNKNOWN, Value, assume, join, tensor
from safe_rope.scan.engine.vocabulary import DEVICE_WORDS

BOOL = tensor("bool")
KEPT = {
    "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "repeat", "flatten", "transpose",
    "permute", "contiguous", "clone", "detach", "cpu", "cuda", "repeat_interleave", "tile", "flip",
    "roll", "index_select", "narrow", "view_as", "unflatten", "movedim", "t", "masked_fill",
    "requires_grad_", "pin_memory", "swapaxes", "broadcast_to", "triu", "tril", "clamp", "clip",
    "clamp_min", "clamp_max", "abs", "neg", "max", "min", "amax", "amin", "gather", "unbind", "split",
    "chunk", "relu",
}  # fmt: skip
# Methods that only tensors have.
_TENSORS_ONLY = {
    "unsqueeze", "expand", "expand_as", "unflatten", "masked_fill", "permute", "contiguous", "detach",
    "repeat_interleave", "view_as",
}  # fmt: skip
_LIMITED = {"clamp", "clip", "clamp_min", "clamp_max", "max", "min"}
ROUNDED = {"ceil", "floor", "round", "trunc"}
COMPARED = {
    "ne", "eq", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "isin", "isnan",
    "isinf", "any", "all", "bool", "not_equal", "greater", "less",
}  # fmt: skip
SUMMED = {"sum", "cumsum", "prod", "cumprod", "count_nonzero"}
FLOATED = {
    "exp", "log", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan", "sigmoid", "tanh", "reciprocal",
    "softmax", "log_softmax", "mean", "std", "exp2", "expm1", "log1p", "erf", "acos", "asin", "atan",
    "deg2rad",
}  # fmt: skip
_FILLED = {"zeros", "ones", "full", "empty"}
_WHOLE = {f"{kind}{name}" for name in ("zeros", "ones") for kind in ("", "new_")} | {
    "zeros_like",
    "ones_like",
}
_GRIDS = {"linspace", "logspace", "range"}
_DEFAULTED = {*_FILLED, *_GRIDS, "rand", "randn", "normal", "eye"}
_INDEXED = {
    "argmax", "argmin", "argsort", "nonzero", "bucketize", "searchsorted", "randint", "randperm", "bincount",
}  # fmt: skip
_MADE = dict.fromkeys((*_INDEXED, "LongTensor", "IntTensor"), "int") | {
    "Tensor": "default", "FloatTensor": "float32",
}  # fmt: skip
CASTS = {
    "long": "int", "int": "int", "short": "int", "byte": "int", "float": "float32", "double": "float64",
    "half": "float16", "bfloat16": "bfloat16",
}  # fmt: skip
JOINED = {"cat", "stack", "concat", "hstack", "vstack", "meshgrid", "broadcast_tensors"}
TO_BITS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift)
_OPERANDS = ("input", "self", "other", "exponent")  # by name, in their order
OPERATORS: dict[str, ast.operator] = {
    "add": ast.Add(), "sub": ast.Sub(), "mul": ast.Mult(), "div": ast.Div(), "true_divide": ast.Div(),
    "pow": ast.Pow(), "outer": ast.Mult(), "ger": ast.Mult(), "multiply": ast.Mult(), "matmul": ast.Mult(),
    "floor_divide": ast.FloorDiv(), "fmod": ast.Mod(), "remainder": ast.Mod(),
}  # fmt: skip


def operator(call: ast.Call, name: str) -> ast.operator:
    """Return the operator that a function or method of `OPERATORS` stands for, as its rounding has it."""
    rounded = any(word.arg == "rounding_mode" and not _is_none(word.value) for word in call.keywords)
    return ast.FloorDiv() if rounded else OPERATORS[name]


def operands(call: ast.Call) -> list[ast.expr]:
    """Return what a function of torch computes with, given by position or by name."""
    named = {word.arg: word.value for word in call.keywords}
    return [*call.args, *(named[name] for name in _OPERANDS if name in named)]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def promote(operation: ast.operator, left: Value, right: Value) -> Value:
    """Return what an operation gives of which at least one side is a tensor."""
    raised = isinstance(operation, ast.Pow) and right.grid and left.constant not in (1, -1)
    # A power and a number are the frequencies of a filter, a Gaussian's centre, a loss: no inverse frequency.
    shifted = isinstance(operation, ast.Add | ast.Sub) and "number" in (left.sort, right.sort)
    shifted = shifted or isinstance(operation, ast.FloorDiv | ast.Mod)  # the digits of a number
    whole = isinstance(operation, ast.FloorDiv) or (
        left.whole and right.whole and not isinstance(operation, ast.Div | ast.Pow)
    )
    return tensor(
        _promoted(operation, left, right),
        whole or None,
        grid=right.grid or (left.grid and not isinstance(operation, ast.Pow)),
        exponent=raised or ((left.exponent or right.exponent) and not shifted),
        assumed=left.assumed or right.assumed,
    )


def _promoted(operation: ast.operator, left: Value, right: Value) -> str:
    """Return the dtype of an operation of which at least one side is a tensor."""
    if isinstance(operation, TO_BITS):
        return "int"  # none but booleans and integers have bits
    if "complex" in (left.dtype, right.dtype):
        return "complex"
    sides = [side for side in (left, right) if side.sort == "tensor"]
    if len(sides) == 1:
        (side,), other = sides, right if sides[0] is left else left
        if not side.is_int:
            return side.dtype
        if other.sort != "number":
            return ""
        return "default" if isinstance(operation, ast.Div) or other.is_float else "int"
    dtypes = {left.dtype, right.dtype}
    if dtypes <= {"int", "bool"}:
        return "default" if isinstance(operation, ast.Div) else "int"
    dtypes -= {"int", "bool"}
    if len(dtypes) == 1:
        return dtypes.pop()
    pinned = {"float64", "float32"} & dtypes
    return max(pinned) if pinned and "" not in dtypes else ""


def of_call(evaluator: Evaluator, call: Call, place: Place) -> Value:
    """Return what is known of a call's result, if it is a tensor."""
    value = _of_call(evaluator, call, place)
    # A dtype may be unpacked into it.
    casts = call.mapped or (call.unpacked and getattr(call.node.func, "attr", "") in ("to", "type"))
    return assume(value) if casts and value is not UNKNOWN else value


def _of_call(evaluator: Evaluator, call: Call, place: Place) -> Value:
    module, _, name = call.function.rpartition(".")
    if module in ("torch", "torch.nn.functional", "torch.special", "torch.Tensor"):
        return _function(evaluator, call, name)
    if call.positional and call.function in ("einops.rearrange", "einops.repeat"):
        return evaluator.of(call.positional[0])
    if call.positional and name in ("Parameter", "Buffer") and module.startswith("torch.nn"):
        return registered(evaluator.of(call.positional[0]))
    function = call.node.func
    if not isinstance(function, ast.Attribute) or module.startswith("."):
        return UNKNOWN
    if module not in ("", "self"):
        # A method of something that only looks like a module, as ``x.float()`` with x unbound.
        base = evaluator.value(function.value, place)
        if base.sort != "tensor" and not base.dtype and (name not in CASTS or "." in module):
            return UNKNOWN
    return _method(evaluator, call, function, place)


def given_dtype(evaluator: Evaluator, call: Call) -> Value | None:
    """Return what is known of a call's ``dtype=``; None where there is none, or where it is None."""
    given = call.keywords.get("dtype")
    value = None if given is None else evaluator.of(given)
    return None if value is None or value.sort == "none" else value


def _function(evaluator: Evaluator, call: Call, name: str) -> Value:
    """Return what a function of torch gives."""
    if (out := call.keywords.get("out")) is not None:
        into = evaluator.of(out)
        return tensor(into.dtype, grid=name == "arange" or into.grid, assumed=True)
    if name == "arange":
        given = given_dtype(evaluator, call)
        assumed = given is not None and given.assumed
        return tensor(arange_dtype(evaluator, call), whole=True, grid=True, assumed=assumed)
    given = None if name == "softmax" else given_dtype(evaluator, call)
    if given is not None:
        unknown = "" if given.sort == "dtype" else "inherited"
        whole = True if name in ("ones", "zeros") else None
        return tensor(given.dtype or unknown, whole, grid=name in _GRIDS, assumed=given.assumed)
    if name == "full":
        return _full(evaluator, call)
    if name in _DEFAULTED:
        return tensor("default", whole=True if name in _WHOLE else None, grid=name in _GRIDS)
    if name == "bincount" and (len(call.positional) > 1 or "weights" in call.keywords):
        return UNKNOWN
    if name in _MADE:
        return tensor(_MADE[name])
    positional = [*call.positional, *(call.keywords[word] for word in _OPERANDS if word in call.keywords)]
    if not positional:
        return UNKNOWN
    first = positional[0]
    if name in JOINED and isinstance(first.value, ast.Tuple | ast.List):
        return join([evaluator.value(item, first.place) for item in first.value.elts])
    if name == "where" and len(call.positional) == 3:
        return join([evaluator.of(item) for item in call.positional[1:]])
    of = evaluator.of(first)
    if name in ("tensor", "as_tensor"):
        if of.sort == "tensor":
            return of
        return tensor("int") if of.floating is False else tensor("default" if of.floating else "", of.whole)
    if name in JOINED:
        return of
    if name.endswith("_like"):
        return tensor(of.dtype or "inherited", True if name in _WHOLE else None, assumed=of.assumed)
    if name in OPERATORS and len(positional) == 2:
        other = evaluator.of(positional[1])
        return promote(operator(call.node, name), of, other) if "tensor" in (of.sort, other.sort) else UNKNOWN
    return _operation(of, name)


def _full(evaluator: Evaluator, call: Call) -> Value:
    """Return a tensor of one number, in its own dtype."""
    given = call.argument(1, "fill_value")
    of = Value() if given is None else evaluator.of(given)
    if of.sort == "number" and of.floating is False and not of.assumed:
        return tensor("int")
    return tensor("default", whole=(of.is_float and of.whole is True) or None)


def _method(evaluator: Evaluator, call: Call, function: ast.Attribute, place: Place) -> Value:
    """Return what a method of a tensor gives."""
    name = function.attr
    of = evaluator.value(function.value, place)
    if name in ("to", "type", "type_as"):
        target = cast_target(evaluator, call)
        if target is None:
            return of
        cast = _with_dtype(of, target.dtype or "inherited")
        return assume(cast) if target.assumed else cast
    if name in CASTS and not call.positional:
        return _with_dtype(of, CASTS[name])
    if name.startswith("new_") and name[4:] in _FILLED | {"tensor"}:
        given = given_dtype(evaluator, call) or of
        return tensor(given.dtype or "inherited", True if name in _WHOLE else None, assumed=given.assumed)
    if name in SUMMED | {"softmax", "mean"} and (asked := given_dtype(evaluator, call)) is not None:
        return tensor(asked.dtype or "inherited", of.whole, assumed=asked.assumed)
    if name in OPERATORS and len(call.positional) == 1 and of.sort == "tensor":
        return promote(operator(call.node, name), of, evaluator.value(call.positional[0].value, place))
    if name in _LIMITED:
        limits = [evaluator.of(limit) for limit in (*call.positional, *call.keywords.values())]
        if any(limit.sort not in ("number", "none") or limit.is_float for limit in limits):
            return UNKNOWN  # another tensor's dtype, or a float's, may be that of the result
    given_to = (*call.positional, *call.keywords.values())
    if name == "view" and any(evaluator.of(shape).sort == "dtype" for shape in given_to):
        return UNKNOWN
    return _operation(of, name)


def _with_dtype(of: Value, dtype: str, whole: bool | None = None) -> Value:
    """Return a tensor of the same numbers, or of those rounded to whole ones."""
    return tensor(dtype, whole or of.whole, grid=of.grid, exponent=of.exponent, assumed=of.assumed)


def _operation(of: Value, name: str) -> Value:
    """Return what a unary operation gives."""
    if name in COMPARED or name in _INDEXED:
        return tensor("bool" if name in COMPARED else "int", assumed=of.assumed or of.sort != "tensor")
    known = of.sort == "tensor" or (of.sort == "unknown" and (of.dtype or name in ROUNDED | _TENSORS_ONLY))
    if not known:
        return UNKNOWN
    if name in KEPT:
        return _with_dtype(of, of.dtype)
    if name in ROUNDED:
        return _with_dtype(of, of.dtype or "float", whole=True)
    if name in SUMMED:
        return _with_dtype(of, "int" if of.is_int else of.dtype)
    if name in FLOATED:
        grid = of.grid and of.dtype != "complex"  # else a cosine and a sine
        raised = (name in ("exp", "exp2") and grid) or (name == "reciprocal" and of.exponent)
        return tensor("default" if of.is_int else of.dtype, exponent=raised)
    return UNKNOWN


def registered(value: Value) -> Value:
    """Return what is known of a tensor once it is a buffer or parameter: a cast of its module lowers it."""
    floats = value.sort == "tensor" and value.dtype in FLOATING
    return replace(value, dtype="inherited") if floats else value


def arange_dtype(evaluator: Evaluator, call: Call) -> str:
    """Return the dtype of an arange: as given, else float if any bound is a float."""
    if (given := given_dtype(evaluator, call)) is not None:
        return given.dtype or "inherited"
    return "default" if any(value.is_float for value in bounds(evaluator, call)) else "int"


def bounds(evaluator: Evaluator, call: Call) -> list[Value]:
    """Return what is known of an arange's start, end and step."""
    return [evaluator.of(argument) for argument in call.bounds]


def cast_target(evaluator: Evaluator, call: Call) -> Value | None:
    """Return the dtype that ``.to``, ``.type`` or ``.type_as`` casts to; None if it casts to none."""
    target = cast_argument(evaluator, call)
    if target is None:
        return None
    value = evaluator.of(target)
    if value.sort == "dtype":
        return value
    dtype = "inherited" if value.dtype in ("", "float") else value.dtype
    return Value("dtype", dtype=dtype, source=f"{ast.unparse(target.value)}.dtype", assumed=value.assumed)


def cast_argument(evaluator: Evaluator, call: Call) -> Argument | None:
    """Return the argument that decides the dtype of a cast: a dtype or a tensor."""
    for name in ("dtype", "other"):
        if name in call.keywords:
            return call.keywords[name]
    for argument in call.positional[:2]:
        sort = evaluator.of(argument).sort
        if isinstance(argument.value, ast.Constant) and sort != "dtype":
            continue
        if sort in ("dtype", "tensor") or (sort == "unknown" and not _is_device(argument.value)):
            return argument
    return None


def _is_device(node: ast.expr) -> bool:
    text = ast.unparse(node).lower()
    return "dtype" not in text and any(word in text for word in DEVICE_WORDS)
