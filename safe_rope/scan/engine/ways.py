"""Names of what hands a value on, ends its way, or gives it to an object of the file."""

from __future__ import annotations

from safe_rope.scan.engine import tensors

# Attributes that are the tensor, a part of it or its dtype; and those that say nothing of its dtype.
PARTS = {"T", "mT", "H", "mH", "data", "real", "imag", "values", "indices", "dtype"}
FACTS = {"shape", "device", "ndim", "is_cuda", "layout", "requires_grad", "grad_fn", "is_sparse"}
# Methods and functions whose result has no dtype, or one that the value does not decide.
ENDS = (
    tensors.COMPARED | set(tensors.CASTS)
    | {"size", "numel", "dim", "nelement", "stride", "item", "tolist", "numpy", "equal",
       "argsort", "argmax", "argmin", "bucketize", "nonzero", "get_device", "data_ptr", "is_contiguous"}
)  # fmt: skip
NO_TENSOR = {"len", "print", "isinstance", "str", "repr", "id", "int", "float", "bool", "range", "hash"}
SAME = {
    "list", "tuple", "zip", "enumerate", "reversed", "sorted", "iter", "next", "sum", "max", "min", "abs",
}  # fmt: skip
# Decorators that leave what a function gives as it is.
TRANSPARENT = {
    "staticmethod", "classmethod", "property", "cached_property", "no_grad", "inference_mode", "cache",
    "lru_cache", "script", "compile", "disable", "abstractmethod", "overload", "override",
}  # fmt: skip
# What reads attributes without their names: methods and attributes, and functions.
ALL_ATTRIBUTES = (
    "buffers", "named_buffers", "state_dict", "__dict__", "_buffers", "_parameters", "__getattribute__",
    "getmembers",
)  # fmt: skip
ALL_NAMES = {"vars", "eval", "exec", "getmembers"}  # of variables and attributes
LOOKS = {"hasattr", "register_buffer", "register_parameter", "setattr", "delattr"}
# What classes define that then see what an operator, a comparison, an index or an attribute is given.
_SIGNS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
OPERATES = {f"__{way}{sign}__" for sign in _SIGNS for way in ("", "r", "i")} | {"__torch_function__"}
COMPARES = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__torch_function__"}
SETS = {"__setattr__", "__set__"}
