"""Whether a function computes the same whatever its arguments hold, and whatever else there is.

A sample says nothing of a branch that it does not take, of a number that somebody changes or a mode that is
switched. Nor does it of what a call leaves behind.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Iterator
from typing import Any

from safe_rope._base import instructions
from safe_rope._base.bytecode import writes_to_arguments

_ARRANGING = {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "view_as"),
    *("transpose", "permute", "movedim", "swapaxes", "swapdims", "mT", "T", "contiguous", "clone"),
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "index_select", "gather"),
    *("cat", "concat", "concatenate", "stack", "repeat", "repeat_interleave", "roll", "flip", "tile"),
    *("shape", "size", "dim", "ndim", "dtype", "device", "float", "to", "type_as", "numel"),
    *("rearrange", "pack", "unpack", "Tensor"),
}
_COMPUTING = {
    *("mul", "multiply", "add", "sub", "subtract", "neg", "negative", "addcmul", "einsum", "sum"),
    *("view_as_complex", "view_as_real", "complex", "real", "imag", "conj"),
}
_KNOWN = _ARRANGING | _COMPUTING
_BUILTINS = {"len", "range", "slice", "tuple", "list", "zip", "enumerate", "int", "min", "max", "Ellipsis"}
_STATEFUL = ("STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR", "IMPORT_", "LOAD_NAME")


def is_plain(function: Any) -> bool:
    """Whether ``function``, and what it calls, has no branches, reads no state and leaves nothing behind.

    A test for None decides by how it is called, which a sample does in the same way.
    """
    waiting, seen = [function], set[Any]()
    while waiting:
        one = waiting.pop()
        if type(one) is not types.FunctionType:
            return False
        if one.__code__ in seen:
            continue
        seen.add(one.__code__)
        called = _called(one)
        if called is None:
            return False
        waiting += called
    return True


def _called(function: types.FunctionType) -> list[Any] | None:
    """Return the functions that one calls; None where it does, or may do, anything else than compute."""
    if writes_to_arguments(function.__code__):
        return None
    found = []
    for code in instructions.codes(function.__code__):
        if _branches(code):
            return None
        for step in instructions.steps(code):
            is_outside = step.name == "STORE_DEREF" and step.value in function.__code__.co_freevars
            if step.name.startswith(_STATEFUL) or is_outside:
                return None
            if step.attribute is not None and step.attribute not in _KNOWN | {"functional", "nn", "F"}:
                return None
            if step.name == "LOAD_GLOBAL":
                value = function.__globals__.get(step.value, getattr(builtins, step.value, None))
                if isinstance(value, types.FunctionType) and step.value not in _KNOWN:
                    found.append(value)
                elif not _is_known(step.value, value):
                    return None
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return None if any(type(one) is not types.FunctionType for one in held) else [*found, *held]


def _is_known(name: str, value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "einops")
    return name in _KNOWN or (name in _BUILTINS and value is getattr(builtins, name))


def _branches(code: types.CodeType) -> bool:
    """Whether code decides anything by more than whether something is None."""
    before: tuple[Any, ...] = ()
    for step in _steps(code):
        name = step.name
        if "JUMP_IF" in name or "_IF_" in name:
            is_none = name.endswith("NONE") or (before[-1:] == ("IS_OP",) and "None" in before[-2:-1])
            if not is_none:
                return True
        before = (*before[-1:], "None" if name == "LOAD_CONST" and step.value is None else name)
    return False


def _steps(code: types.CodeType) -> Iterator[instructions.Step]:
    yield from (step for step in instructions.steps(code) if step.name not in ("CACHE", "TO_BOOL", "NOP"))
