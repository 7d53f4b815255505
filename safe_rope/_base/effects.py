"""Whether running the code of a class twice is running it once: told from what it may do at all.

What is not known to do nothing besides counts as if it did. Such are methods of a name that no tensor has,
functions of other packages, and what a closure or a default value holds.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from safe_rope._base import instructions
from safe_rope._base.changes import CHANGING, with_what_it_changes, writes_to_arguments
from safe_rope._base.functions import default_values, filled_cells
from safe_rope._base.instructions import Step
from safe_rope._base.methods import methods_of, names_in, package

_DRAWING = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli"),
    *("multinomial", "dropout", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "random"),
    *("shuffle", "choice", "uniform", "normal", "sample", "poisson", "alpha_dropout", "environ"),
}
"""What draws numbers, or changes the process."""
_ACTING = {"next", "setattr", "delattr", "exec", "eval", "print", "open", "input", "vars", "globals"}
"""Built-in functions that change something."""
_QUIET = {
    *(name for of in (math, torch.Tensor, torch, nn.functional) for name in dir(of) if name[:2] != "__"),
    *("get", "items", "keys", "values", "format", "join", "split", "lower", "replace"),
    *("startswith", "endswith"),
    *("parameters", "buffers", "named_parameters", "named_buffers", "children", "modules"),
}
"""Names of methods and functions that change nothing, or what they are of and is looked for."""
_QUIET_LIBRARIES = ("torch", "math", "numpy", "einops", "transformers", "typing", "builtins")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device)


@functools.lru_cache(maxsize=4096)
def acts(cls: Any) -> bool:
    """Whether methods of a class may do something besides what they return and keep in their module."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    own = {name for base in bases for name in vars(base)}
    return any(_acts(function, own) for function in methods_of(cls))


def _acts(function: types.FunctionType, own: Collection[str]) -> bool:
    if not _DRAWING.isdisjoint(names_in(function)):
        return True
    if not all(map(_is_plain, default_values(function))):
        return True
    code = function.__code__
    if not all(_is_quiet(cell.cell_contents, function) for cell in filled_cells(function)):
        return True
    if function.__name__ not in own and writes_to_arguments(code):
        return True  # what it is given may be anybody's
    if any(one.name == "STORE_DEREF" and one.value in code.co_freevars for one in instructions.steps(code)):
        return True
    return any(_does(inner, function, own) for inner in instructions.codes(code))


def _does(code: types.CodeType, function: types.FunctionType, own: Collection[str]) -> bool:
    done = instructions.steps(code)
    if any("out" in one for one in code.co_consts if isinstance(one, tuple)):
        return True
    kept = _names_of_kept(done, code)
    for at, (one, whole) in enumerate(with_what_it_changes(done)):
        if one.name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return True
        if one.is_method and not _is_called_quietly(done, at, function, own):
            return True
        if one.name.startswith(("LOAD_GLOBAL", "LOAD_NAME")) and not _is_named_quietly(one.value, function):
            return True
        if whole is not None and _is_kept(instructions.source(done, whole)[0], kept, code, function):
            return True
        if instructions.is_in_place(one) and at + 1 < len(done) and done[at + 1].value in kept:
            return True
    return False


def _is_kept(name: Any, kept: set[str], code: types.CodeType, function: types.FunctionType) -> bool:
    """Whether a variable holds what somebody keeps: a global does, unless it is a Python module."""
    if name in code.co_varnames or not isinstance(name, str):
        return name in kept
    return name in function.__globals__ and not isinstance(function.__globals__[name], types.ModuleType)


def _names_of_kept(done: tuple[Step, ...], code: types.CodeType) -> set[str]:
    """The variables that are given what somebody keeps: an attribute, or a part of one."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kept = set()
    for at, one in enumerate(done):
        if one.name.startswith("STORE_FAST") and at and (done[at - 1].attribute or done[at - 1].is_part):
            variable, by_attribute = instructions.source(done, at - 1)
            if by_attribute and (variable in arguments or variable not in code.co_varnames):
                kept.add(one.value)
    return kept


def _is_called_quietly(
    done: tuple[Step, ...], at: int, function: types.FunctionType, own: Collection[str]
) -> bool:
    """Whether calling what step ``at`` takes does nothing besides, told by what it is or its name."""
    first = next(before for before in reversed(range(at)) if done[before].attribute is None)
    held: Any = function.__globals__.get(str(done[first].loads))
    for step in done[first + 1 : at + 1]:
        held = vars(held).get(str(step.attribute)) if isinstance(held, types.ModuleType) else None
    if held is not None:
        return _is_quiet(held, function)
    name = done[at].value
    return name in _QUIET or name in own or name in CHANGING


def _is_named_quietly(name: str, function: types.FunctionType) -> bool:
    everywhere = function.__globals__
    if name not in everywhere:
        return name not in _ACTING or not hasattr(builtins, name)
    return _is_quiet(everywhere[name], function)


def _is_quiet(value: Any, function: types.FunctionType) -> bool:
    """Whether calling a value that ``function`` names does nothing besides, or is looked at elsewhere."""
    if isinstance(value, types.FunctionType):
        root = str(value.__module__).partition(".")[0]
        is_beside = package(value.__module__) == package(function.__module__)
        return root in _QUIET_LIBRARIES or (is_beside and value.__closure__ is None)
    if isinstance(value, (types.ModuleType, type, *_PLAIN)) or not callable(value):
        return True
    return str(type(value).__module__).partition(".")[0] in _QUIET_LIBRARIES


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))
