"""Whether a function computes the same whatever its arguments hold, and whatever else there is.

A sample says nothing of a branch that it does not take, of a number that somebody changes or a mode that is
switched. Nor does it of what a call leaves behind.
"""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Collection
from typing import Any

from safe_rope._base import instructions
from safe_rope._base.changes import writes_to_arguments
from safe_rope._base.functions import filled_cells

_ARRANGING = {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "view_as"),
    *("transpose", "permute", "movedim", "swapaxes", "swapdims", "mT", "T", "contiguous", "clone"),
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "index_select", "gather"),
    *("cat", "concat", "concatenate", "stack", "repeat", "repeat_interleave", "roll", "flip", "tile"),
    *("shape", "size", "dim", "ndim", "dtype", "device", "float", "to", "type_as", "numel"),
    *("rearrange", "pack", "unpack", "Tensor", "functional", "nn", "F"),
}
_COMPUTING = {
    *("mul", "multiply", "add", "sub", "subtract", "neg", "negative", "addcmul", "einsum", "sum"),
    *("view_as_complex", "view_as_real", "complex", "real", "imag", "conj"),
}
_KNOWN = _ARRANGING | _COMPUTING
_BUILTINS = {"len", "range", "slice", "tuple", "list", "zip", "enumerate", "int", "min", "max", "Ellipsis"}
_BUILTINS |= {"isinstance", "str"}
_STATEFUL = ("STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR", "IMPORT_", "LOAD_NAME")
_ENDING = ("STORE_", "POP_TOP", "RETURN_", "DELETE_")
_LENGTHS = frozenset({"max_seq_len_cached", "max_position_embeddings"})

_LAZY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

TRUSTED = "transformers.models."
"""Whose code is known by comparing whole models with stock ones."""

OURS = "__safe_rope_"
"""What the globals of FP32-aware functions begin with."""

Helper = tuple[dict[str, Any], str, Any]
"""The globals in which a function has a helper, its name and the helper itself."""


def is_plain(function: Any, known: Collection[str] = ()) -> bool:
    """Whether ``function``, and what it calls, has no branches, reads no state and leaves nothing behind.

    A test for None decides by how it is called, which a sample does in the same way. One for the type of a
    device, or for a length that tables have, decides nothing about values. ``known``: attributes that
    itself may read besides.
    """
    return helpers_of(function, known) is not None


def helpers_of(function: Any, known: Collection[str] = ()) -> list[Helper] | None:
    """Return the functions that a plain function finds in its globals; None for any other function."""
    waiting, seen, found = [function], set[Any](), list[Helper]()
    while waiting:
        one = waiting.pop()
        if type(one) is not types.FunctionType:
            return None
        if any(name.startswith(OURS) for name in one.__code__.co_names):
            one = vars(one)["__wrapped__"]  # in the place of whose code an FP32-aware one is called
        if one.__code__ in seen:
            continue
        seen.add(one.__code__)
        called = _called(one, known if one is function else ())
        if called is None:
            return None
        found += called
        waiting += [value for _, _, value in called]
        waiting += [cell.cell_contents for cell in filled_cells(one)]
    return found


def _called(function: types.FunctionType, known: Collection[str]) -> list[Helper] | None:
    """Return the functions that one calls; None where it does, or may do, anything else than compute."""
    steps = instructions.steps(function.__code__)
    notes_a_length = any(step.name == "STORE_ATTR" and step.value in _LENGTHS for step in steps)
    writes = not notes_a_length and writes_to_arguments(function.__code__)
    if writes or function.__code__.co_flags & _LAZY:
        return None
    found = []
    for code in instructions.codes(function.__code__):
        if _branches(code):
            return None
        for step in instructions.steps(code):
            is_outside = step.name == "STORE_DEREF" and step.value in function.__code__.co_freevars
            if (step.name.startswith(_STATEFUL) and step.value not in _LENGTHS) or is_outside:
                return None
            if step.attribute is not None and step.attribute not in _KNOWN and step.attribute not in known:
                return None
            if step.name == "LOAD_GLOBAL":
                value = function.__globals__.get(step.value, getattr(builtins, step.value, None))
                if isinstance(value, types.FunctionType) and step.value not in _KNOWN:
                    found.append((function.__globals__, step.value, value))
                elif not _is_known(step.value, value):
                    return None
    return found


def _is_known(name: str, value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "einops")
    return name in _KNOWN or (name in _BUILTINS and value is getattr(builtins, name))


def _branches(code: types.CodeType) -> bool:
    """Whether code decides anything by more than None, the type of a device or the length of tables."""
    before: tuple[Any, ...] = ()
    asked: set[str] = set()
    for step in instructions.steps(code):
        name = step.name
        if name in ("CACHE", "TO_BOOL", "NOP"):
            continue
        if "JUMP_IF" in name or "_IF_" in name:
            is_none = name.endswith("NONE") or (before[-1:] == ("IS_OP",) and "None" in before[-2:-1])
            is_end = before[-1:] == ("WITH_EXCEPT_START",)
            of_device = bool(asked) and asked <= {"device", "type", "isinstance", "str"}
            of_length = bool(asked) and asked <= _LENGTHS
            if not (is_none or is_end or of_device or of_length):
                return True
            asked = set()
        elif name.startswith(_ENDING):
            asked = set()
        elif step.attribute is not None or name == "LOAD_GLOBAL":
            asked.add(step.value)
        before = (*before[-1:], "None" if name == "LOAD_CONST" and step.value is None else name)
    return False
