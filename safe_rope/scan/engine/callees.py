"""What a call calls: a function that takes tensors of any dtypes, of one only, or one that nothing shows."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from safe_rope.scan.engine import tensors
from safe_rope.scan.engine.call_sites import FORWARDS
from safe_rope.scan.engine.inference import Inference
from safe_rope.scan.engine.names import Call
from safe_rope.scan.engine.scopes import Place, Scope
from safe_rope.scan.engine.walk import Walk

# Functions and methods, less underscores around, that take tensors of different dtypes together, or only one.
ANY_DTYPES = (
    tensors.KEPT | tensors.FLOATED | tensors.SUMMED | tensors.ROUNDED | tensors.COMPARED
    | (tensors.JOINED - {"meshgrid"})
    | (set(tensors.OPERATORS) - {"matmul"})
    | {
        "where", "maximum", "minimum", "fmax", "fmin", "hypot", "atan2", "copysign", "addcmul", "addcdiv",
        "float_power", "rsub", "logaddexp", "bucketize", "copy", "to", "type", "type_as", "size", "numel",
        "item", "tolist", "numpy", "arange", "tensor", "as_tensor", "full", "zeros", "ones", "empty", "sort",
        "argsort", "topk", "diff", "unfold", "rearrange", "requires_grad", "equal",
        "Buffer", "Parameter", "linspace", "lgamma", "square", "nan_to_num", "view_as_real",
        "view_as_complex", *tensors.CASTS,
    }
)  # fmt: skip
# What keeps a tensor for later: lists and the like, and a module.
KEEPERS = {"append", "extend", "insert", "register_buffer", "register_parameter"}
# Methods, less underscores around, that take tensors of one dtype; of any other one nothing is known.
ONE_DTYPE = {
    "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm", "baddbmm", "addbmm", "addmv", "lerp",
    "scatter", "scatter_add", "index_put", "index_copy", "index_add", "masked_scatter", "put",
    "allclose", "isclose",
}  # fmt: skip
_OWN = ("self", "cls")
_DEPTH = 8
MOST_CALLS = 64  # that are looked at for what they give a parameter

Operand = tuple[ast.expr, Place]


def surely_takes_any(node: ast.Call) -> bool:
    """Say whether the call alone shows that it takes any dtypes, or nothing: most calls do."""
    function = node.func
    if not isinstance(function, ast.Attribute):
        return False
    own = isinstance(function.value, ast.Name) and function.value.id in _OWN
    return not (node.args or node.keywords) or (not own and function.attr.strip("_") in ANY_DTYPES)


class Callees:
    """Looks up what the calls of one file call."""

    def __init__(self, walk: Walk, inference: Inference) -> None:
        self._walk = walk
        self._inference = inference
        self._names = inference.names
        self._imported = {_root(full) for full in walk.imports.values()} | {"torch"}

    def takes_any(self, call: Call, given: Iterable[Operand], place: Place) -> bool | None:
        """Say whether a call takes tensors of any dtypes; None where nothing shows it.

        A function of another file is out of sight, as what is returned is. One of this file takes any: its
        parameters are followed.
        """
        function, full = call.node.func, call.function
        if self._varies(function, place) or any(self._is_function(*one) for one in given):
            return None
        root, _, name = full.rpartition(".")
        if full.startswith(".") and not root and (name in self._walk.functions or name in self._walk.classes):
            return self._own(function, name)
        if isinstance(function, ast.Attribute) and _root(full) not in self._imported:
            return self._method(function, place)
        if root.partition(".")[0] in ("torch", "einops"):
            return name in ANY_DTYPES or name.endswith("_like") or (name == "einsum" and _is_outer(call))
        return None

    def given(self, call: Call, place: Place) -> list[Operand]:
        """Return what a call is given, also by partial and ``**kwargs``."""
        node = call.node
        given: list[Operand] = [(one, place) for one in (*node.args, *(word.value for word in node.keywords))]
        return given + [
            (one.value, one.place) for one in (*call.positional, *call.keywords.values()) if not one.direct
        ]

    def scopes(self, node: ast.Call, place: Place) -> list[Scope]:
        """Return the functions of this file that a call may call, which ``takes_any`` knows to be all."""
        function = node.func
        if isinstance(function, ast.Attribute):
            return self._methods(function.attr, place)
        return self._named(getattr(function, "id", ""))

    def is_plain(self, index: ast.expr, place: Place) -> bool:
        """Say whether an index is of numbers and slices: an assignment there casts."""
        items = index.elts if isinstance(index, ast.Tuple) else [index]
        return all(
            isinstance(item, ast.Slice | ast.Constant) or self._inference.value(item, place).sort == "number"
            for item in items
        ) and not any(isinstance(one, ast.Compare) for item in items for one in ast.walk(item))  # a mask

    def receiver(self, call: Call, place: Place) -> list[Operand]:
        """Return what a call is a method of."""
        if _root(call.function) in self._imported:
            return []
        function = call.node.func
        return [(function.value, place)] if isinstance(function, ast.Attribute) else []

    def _varies(self, function: ast.expr, place: Place) -> bool:
        """Say whether a name stands for one of several functions."""
        match function:
            case ast.Name(id=name):
                return len(self._names.bindings(name, place)) > 1
            case ast.Attribute(value=ast.Name(id=of), attr=name) if of in _OWN:
                return len(self._names.attributes(name, place)) > 1
        return False

    def _method(self, function: ast.Attribute, place: Place) -> bool | None:
        above = ast.unparse(function.value).startswith("super(")
        name = function.attr
        if not above and getattr(function.value, "id", "") not in _OWN:
            known = name.startswith("new_") or name.strip("_") in ONE_DTYPE
            return name.startswith("new_") if known else None
        return self._follows(name, self._methods(name, place, above=above))

    def _methods(self, name: str, place: Place, *, above: bool = False) -> list[Scope]:
        """Return the methods of a name in the file, none where the class around may have another's.

        A class that derives from it may have that of any. It has one itself or by its first bases, by these
        alone where ``above``.
        """
        if any(name in one.bindings for one in self._walk.classes.values()):
            return []  # one of them has something else by that name
        methods = [one for one in self._walk.functions.get(name, ()) if one.parent is one.owner is not None]
        owners = {id(one.owner) for one in methods}
        owner = place.scope.owner
        for _ in range(_DEPTH):
            if owner is None or (id(owner) in owners and not above):
                break
            base = owner.node.bases[:1]  # type: ignore[attr-defined]
            owner, above = self._walk.classes.get(getattr(base[0], "id", "")) if base else None, False
        else:
            owner = None
        return [] if owner is None else methods

    def _own(self, function: ast.expr, name: str) -> bool | None:
        if getattr(function, "id", "") != name:
            return None  # an alias, whose calls are not found by the name
        return self._follows(name, self._named(name))

    def _named(self, name: str) -> list[Scope]:
        """Return the functions of a name, or the constructor of the class."""
        if name in self._walk.classes:
            owner = self._walk.classes[name]
            return [one for one in self._walk.functions.get("__init__", ()) if one.parent is owner]
        return self._walk.functions.get(name, [])

    def _follows(self, name: str, scopes: list[Scope]) -> bool | None:
        """Say whether all that calls of a name give to some functions is followed into their parameters."""
        known = scopes and len(self._walk.calls.get(name, ())) <= MOST_CALLS and name not in FORWARDS
        return True if known and not any(map(_packs, scopes)) else None

    def _is_function(self, node: ast.expr, place: Place) -> bool:
        """Say whether an argument is a function of torch or of this file, or prepares one."""
        match node:
            case ast.Lambda():
                return True
            case ast.Call(func=ast.Name() | ast.Attribute() as function):
                return self._names.qualify(function, place) == "functools.partial"
            case ast.Name(id=name):
                if any(isinstance(one.value, ast.Lambda) for one in self._names.bindings(name, place)):
                    return True
            case ast.Attribute(value=ast.Name(id=of), attr=name) if of in _OWN:
                if self._methods(name, place):
                    return True
            case ast.Attribute():
                pass
            case _:
                return False
        full = self._names.qualify(node, place)
        if full.startswith("torch."):
            return self._inference.value(node, place).sort == "unknown"
        return full.startswith(".") and full[1:] in self._walk.functions


def _root(full: str) -> str:
    """Return the first part of a full name, with the dots of a relative import."""
    name = full.lstrip(".")
    return full[: len(full) - len(name)] + name.partition(".")[0]


def _packs(scope: Scope) -> bool:
    """Say whether a function packs arguments, which are not followed."""
    arguments = scope.node.args  # type: ignore[attr-defined]
    return arguments.vararg is not None or arguments.kwarg is not None


def _is_outer(call: Call) -> bool:
    """Say whether an einsum sums over nothing: torch then multiplies elementwise, whatever the dtypes."""
    equation = call.positional[0].value if call.positional else None
    if not isinstance(equation, ast.Constant) or not isinstance(equation.value, str):
        return False
    inputs, _, output = equation.value.replace(" ", "").partition("->")
    return set(inputs) - {","} <= set(output)
