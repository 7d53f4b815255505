"""Dtypes: what ``dtype=`` names, through variables, parameters and other tensors."""

from __future__ import annotations

import ast
import re

from safe_rope.scan.engine.evaluator import Evaluator
from safe_rope.scan.engine.scopes import Place
from safe_rope.scan.engine.values import (
    DEVICE,
    FLOAT_BY_ANNOTATION,
    INT,
    INTS,
    NONE,
    PINNED,
    UNKNOWN,
    Value,
    join,
    tensor,
)

_DTYPES = {
    "float32": "float32", "float": "float32", "float64": "float64", "double": "float64",
    "bfloat16": "bfloat16", "float16": "float16", "half": "float16",
    "bool": "bool",
    "complex64": "complex", "cfloat": "complex", "complex128": "complex", "cdouble": "complex",
} | dict.fromkeys(
    ("int64", "long", "int32", "int", "int16", "short", "int8", "uint8", "uint16", "uint32", "uint64", "byte",
     "char"), "int"
)  # fmt: skip
_PYTHONS = {"float": "float64", "int": "int", "bool": "bool", "complex": "complex"}
_EXPLICIT = {"float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8"}
_TENSOR_CLASSES = {
    "LongTensor": "int", "IntTensor": "int", "ShortTensor": "int", "ByteTensor": "int", "BoolTensor": "bool",
    "FloatTensor": "inherited", "HalfTensor": "float16", "BFloat16Tensor": "bfloat16", "Tensor": "",
}  # fmt: skip
_ANNOTATIONS = {
    "int": INT, "float": FLOAT_BY_ANNOTATION, "bool": Value("number", whole=True, floating=False, bound=1),
    "dtype": Value("dtype", dtype="inherited"),
}  # fmt: skip
_SEQUENCES = {"int", "list", "tuple", "List", "Tuple", "Sequence", "Iterable"}
_NO_ANNOTATIONS = re.compile(r"\btorch\.(?:int|float|bool)\b")  # dtypes, of whatever they are meant to say
_WORD = re.compile(r"[A-Za-z_]\w*")


def named(function: str) -> Value | None:
    """Return the dtype that a full name stands for."""
    if function in _PYTHONS:
        return Value("dtype", dtype=_PYTHONS[function], source=function)
    base, _, last = function.rpartition(".")
    if base and base != "torch" and last.lower() in _EXPLICIT:
        # numpy's, jax's or a kernel language's
        return Value("dtype", dtype=_DTYPES[last.lower()], source=function)
    if base in ("torch", "torch.cuda") and last.endswith("Tensor"):  # as .type() takes it
        last = last.removesuffix("Tensor").lower()
    elif base != "torch":
        return None
    if last.startswith("float8"):
        return Value("dtype", dtype="float8", source=function)
    return Value("dtype", dtype=_DTYPES[last], source=function) if last in _DTYPES else None


def of_attribute(evaluator: Evaluator, node: ast.Attribute, place: Place) -> Value:
    """Return the dtype that ``x.dtype`` is."""
    of = evaluator.value(node.value, place)
    source = ast.unparse(node)
    if not of.dtype and "mask" in source:
        return Value("dtype", source=source)  # as often integers or booleans as not
    if of.sort in ("tensor", "unknown") and of.dtype:
        dtype = "inherited" if of.dtype == "float" else of.dtype
        return Value("dtype", dtype=dtype, source=source, assumed=of.assumed)
    return Value("dtype", dtype="inherited", source=source)


def of_choice(evaluator: Evaluator, node: ast.IfExp, place: Place) -> Value | None:
    """Return the dtype of ``float32 if x.dtype in (float16, bfloat16) else x.dtype`` and its like.

    None where nothing shows that no low dtype is left.
    """
    match node.test:
        case ast.Compare(left=asked, ops=[how], comparators=[among]):
            items = among.elts if isinstance(among, ast.Tuple | ast.List | ast.Set) else [among]
            named = {evaluator.value(item, place).dtype for item in items}
            if isinstance(how, ast.In | ast.Eq):
                inside, outside = node.body, node.orelse
            elif isinstance(how, ast.NotIn | ast.NotEq):
                inside, outside = node.orelse, node.body
            else:
                return None
            same = ast.dump(asked)
            if named <= PINNED and ast.dump(inside) == same:
                other = outside
            elif named >= {"float16", "bfloat16"} and ast.dump(outside) == same:
                other = inside
            else:
                return None
            kept = Value("dtype", dtype="float32", source=ast.unparse(asked), assumed=True)
            return join([evaluator.value(other, place), kept])
    return None


def of_annotation(annotation: ast.expr | None) -> Value:
    """Return what a parameter's annotation says."""
    if annotation is None:
        return UNKNOWN
    try:
        text: object = getattr(annotation, "id", None)  # as most have
        if text is None:
            text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    except RecursionError:  # pragma: no cover - the parser refuses such depth first
        return UNKNOWN
    if _NO_ANNOTATIONS.search(str(text)):
        return UNKNOWN
    words = set(_WORD.findall(str(text))) - {"Optional", "None", "Union", "typing", "torch", "Annotated"}
    if len(words) == 1 and (only := min(words)) in _ANNOTATIONS:
        return _ANNOTATIONS[only]
    if words and words <= set(_TENSOR_CLASSES):
        dtypes = {_TENSOR_CLASSES[word] for word in words}
        return tensor(dtypes.pop() if len(dtypes) == 1 else "")
    if "device" in words and words <= {"device", "str"}:
        return DEVICE
    if "int" in words and words <= _SEQUENCES:
        return INTS
    return NONE if str(text) == "None" else UNKNOWN
