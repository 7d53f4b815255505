"""Tensors: which dtype an operation gives, and whether its values are whole numbers."""

from __future__ import annotations

import ast
from dataclasses import replace

from safe_rope.scan.engine.evaluator import Evaluator
from safe_rope.scan.engine.names import Argument, Call
from safe_rope.scan.engine.scopes import Place
from safe_rope.scan.engine.values import FLOATING, UNKNOWN, Value, join, tensor
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
_ROUNDED = {"ceil", "floor", "round", "trunc"}
_COMPARED = {
    "ne", "eq", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "isin", "isnan",
    "isinf", "any", "all", "bool", "not_equal", "greater", "less",
}  # fmt: skip
_SUMMED = {"sum", "cumsum", "prod", "cumprod", "count_nonzero"}
FLOATED = {
    "exp", "log", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan", "sigmoid", "tanh", "reciprocal",
    "softmax", "log_softmax", "mean", "std", "exp2", "expm1", "log1p", "erf", "acos", "asin", "atan",
    "deg2rad",
}  # fmt: skip
_FILLED = {"zeros", "ones", "full", "empty"}
_GRIDS = {"linspace", "logspace", "range"}
_RANDOM = {"rand", "randn", "normal", "linspace", "logspace", "range", "eye"}
_INDEXED = {
    "argmax",
    "argmin",
    "argsort",
    "nonzero",
    "bucketize",
    "searchsorted",
    "randint",
    "randperm",
    "bincount",
}
_CASTS = {
    "long": "int", "int": "int", "short": "int", "byte": "int", "float": "float32", "double": "float64",
    "half": "float16", "bfloat16": "bfloat16",
}  # fmt: skip
JOINED = {"cat", "stack", "concat", "hstack", "vstack", "meshgrid", "broadcast_tensors"}
OPERATORS: dict[str, ast.operator] = {
    "add": ast.Add(), "sub": ast.Sub(), "mul": ast.Mult(), "div": ast.Div(), "true_divide": ast.Div(),
    "pow": ast.Pow(), "outer": ast.Mult(), "ger": ast.Mult(), "multiply": ast.Mult(), "matmul": ast.Mult(),
    "floor_divide": ast.FloorDiv(), "fmod": ast.Mod(), "remainder": ast.Mod(),
}  # fmt: skip


def promote(operation: ast.operator, left: Value, right: Value) -> Value:
    """Return what an operation gives of which at least one side is a tensor."""
    raised = isinstance(operation, ast.Pow) and right.grid and left.constant not in (1, -1)
    grid, exponent = left.grid or right.grid, left.exponent or right.exponent or raised
    whole = True if left.whole and right.whole and not isinstance(operation, ast.Div | ast.Pow) else None
    if isinstance(operation, ast.FloorDiv):
        whole = True
    dtype = _promoted(operation, left, right)
    return tensor(dtype, whole, grid=grid, exponent=exponent)


def _promoted(operation: ast.operator, left: Value, right: Value) -> str:
    """Return the dtype of an operation of which at least one side is a tensor."""
    sides = [side for side in (left, right) if side.sort == "tensor"]
    if len(sides) == 1:
        (side,), other = sides, right if sides[0] is left else left
        if not side.is_int:
            return side.dtype
        if isinstance(operation, ast.Div) or other.is_float:
            return "default" if other.sort == "number" else ""
        return "int" if other.sort == "number" else ""
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
    module, _, name = call.function.rpartition(".")
    if module in ("torch", "torch.nn.functional", "torch.special", "torch.Tensor"):
        return _function(evaluator, call, name, place)
    if call.function in ("einops.rearrange", "einops.repeat") and call.positional:
        return evaluator.value(call.positional[0].value, call.positional[0].place)
    if name in ("Parameter", "Buffer") and module.startswith("torch.nn") and call.positional:
        return registered(evaluator.value(call.positional[0].value, call.positional[0].place))
    if isinstance(call.node.func, ast.Attribute) and module in ("", "self"):
        return _method(evaluator, call, call.node.func, place)
    if module and not module.startswith(".") and isinstance(call.node.func, ast.Attribute):
        # A method of something that only looks like a module, as ``x.float()`` with x unbound.
        base = evaluator.value(call.node.func.value, place)
        if base.sort == "tensor" or base.dtype or (name in _CASTS and "." not in module):
            return _method(evaluator, call, call.node.func, place)
    return UNKNOWN


def _function(evaluator: Evaluator, call: Call, name: str, place: Place) -> Value:
    if name == "arange":
        return tensor(arange_dtype(evaluator, call), whole=True, grid=True)
    given = call.keywords.get("dtype")
    if given is not None and name not in ("softmax",):
        dtype = evaluator.value(given.value, given.place)
        if dtype.sort != "none":
            unknown = "" if dtype.sort == "dtype" else "inherited"
            whole = True if name in ("ones", "zeros") else None
            return tensor(dtype.dtype or unknown, whole, grid=name in _GRIDS)
    if name in _FILLED:
        return tensor("default", whole=True if name in ("ones", "zeros") else None)
    if name in _RANDOM:
        return tensor("default", grid=name in _GRIDS)
    if name in ("tensor", "as_tensor") and call.positional:
        argument = call.positional[0]
        content = evaluator.value(argument.value, argument.place)
        if content.sort == "tensor":
            return content
        if content.floating is False:
            return tensor("int")
        return tensor("default" if content.floating else "", content.whole)
    if name in ("LongTensor", "IntTensor"):
        return tensor("int")
    if name in ("Tensor", "FloatTensor"):
        return tensor("float32" if name == "FloatTensor" else "default")
    if name in _INDEXED:
        return tensor("int")
    if name in JOINED and call.positional:
        argument = call.positional[0]
        if isinstance(argument.value, ast.Tuple | ast.List):
            return join([evaluator.value(item, argument.place) for item in argument.value.elts])
        return evaluator.value(argument.value, argument.place)
    if name == "where" and len(call.positional) == 3:
        return join([evaluator.value(item.value, item.place) for item in call.positional[1:]])
    if name.endswith("_like") and call.positional:
        like = evaluator.value(call.positional[0].value, call.positional[0].place)
        return tensor(like.dtype or "inherited", True if name in ("ones_like", "zeros_like") else None)
    if name in OPERATORS and len(call.positional) == 2:
        left, right = (evaluator.value(item.value, item.place) for item in call.positional)
        if name in ("div", "true_divide") and "rounding_mode" in call.keywords:
            return promote(ast.FloorDiv(), left, right)
        return promote(OPERATORS[name], left, right) if "tensor" in (left.sort, right.sort) else UNKNOWN
    if call.positional:
        of = call.positional[0]
        return _operation(evaluator.value(of.value, of.place), name)
    return UNKNOWN


def _method(evaluator: Evaluator, call: Call, function: ast.Attribute, place: Place) -> Value:
    name = function.attr
    of = evaluator.value(function.value, place)
    if name in ("to", "type", "type_as"):
        target = cast_target(evaluator, call)
        if target is None:
            return of
        return tensor(target.dtype or "inherited", of.whole, grid=of.grid, exponent=of.exponent)
    if name in _CASTS and not call.positional:
        return tensor(_CASTS[name], of.whole, grid=of.grid, exponent=of.exponent)
    if name.startswith("new_") and name[4:] in _FILLED | {"tensor"}:
        return tensor(of.dtype or "inherited", True if name in ("new_ones", "new_zeros") else None)
    if name in ("cumsum", "sum", "softmax") and (given := call.keywords.get("dtype")) is not None:
        return tensor(evaluator.value(given.value, given.place).dtype or "inherited", of.whole)
    if name in OPERATORS and len(call.positional) == 1 and of.sort == "tensor":
        other = evaluator.value(call.positional[0].value, place)
        return promote(OPERATORS[name], of, other)
    return _operation(of, name)


def _operation(of: Value, name: str) -> Value:
    """Return what a unary operation gives."""
    if name in _COMPARED:
        return BOOL
    if name in _INDEXED:
        return tensor("int")
    known = of.sort == "tensor" or (of.sort == "unknown" and (of.dtype or name in _ROUNDED | _TENSORS_ONLY))
    if not known:
        return UNKNOWN
    if name in KEPT:
        return tensor(of.dtype, of.whole, grid=of.grid, exponent=of.exponent)
    if name in _ROUNDED:
        return tensor(of.dtype or "float", True, grid=of.grid, exponent=of.exponent)
    if name in _SUMMED:
        return tensor("int" if of.is_int else of.dtype, of.whole, grid=of.grid, exponent=of.exponent)
    if name in FLOATED:
        raised = (name in ("exp", "exp2") and of.grid) or (name == "reciprocal" and of.exponent)
        return tensor("default" if of.is_int else of.dtype, exponent=raised)
    return UNKNOWN


def registered(value: Value) -> Value:
    """Return what is known of a tensor once it is a buffer or parameter: a cast of its module lowers it."""
    floats = value.sort == "tensor" and value.dtype in FLOATING
    return replace(value, dtype="inherited") if floats else value


def arange_dtype(evaluator: Evaluator, call: Call) -> str:
    """Return the dtype of an arange: as given, else float if any bound is a float."""
    given = call.keywords.get("dtype")
    if given is not None:
        dtype = evaluator.value(given.value, given.place)
        if dtype.sort != "none":
            return dtype.dtype or "inherited"
    return "default" if any(value.is_float for value in bounds(evaluator, call)) else "int"


def bounds(evaluator: Evaluator, call: Call) -> list[Value]:
    """Return what is known of an arange's start, end and step."""
    names = [name for name in ("start", "end", "step") if name in call.keywords]
    found = [*call.positional[:3], *(call.keywords[name] for name in names)]
    return [evaluator.value(argument.value, argument.place) for argument in found]


def cast_target(evaluator: Evaluator, call: Call) -> Value | None:
    """Return the dtype that ``.to``, ``.type`` or ``.type_as`` casts to; None if it casts to none."""
    target = cast_argument(evaluator, call)
    if target is None:
        return None
    value = evaluator.value(target.value, target.place)
    if value.sort == "dtype":
        return value
    dtype = "inherited" if value.dtype in ("", "float") else value.dtype
    return Value("dtype", dtype=dtype, source=f"{ast.unparse(target.value)}.dtype")


def cast_argument(evaluator: Evaluator, call: Call) -> Argument | None:
    """Return the argument that decides the dtype of a cast: a dtype or a tensor."""
    if "dtype" in call.keywords:
        return call.keywords["dtype"]
    if "other" in call.keywords:
        return call.keywords["other"]
    for argument in call.positional[:2]:
        if isinstance(argument.value, ast.Constant):
            continue
        value = evaluator.value(argument.value, argument.place)
        if value.sort in ("dtype", "tensor"):
            return argument
        if value.sort == "unknown" and not _is_device(argument.value):
            return argument
    return None


def _is_device(node: ast.expr) -> bool:
    text = ast.unparse(node).lower()
    return "dtype" not in text and any(word in text for word in DEVICE_WORDS)
