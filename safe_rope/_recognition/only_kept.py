"""Arguments that a constructor does nothing with but to keep them, as the index of a layer.

Two calls that differ in such arguments alone make the same tables.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from safe_rope._base import methods
from safe_rope._base.instructions import Step, codes, rebound, steps
from safe_rope._recognition.outside import is_followed

_EVERYTHING = {"locals", "__dict__", "__getstate__", "eval", "exec", "_getframe", "currentframe", "stack"}
"""Names of what reads attributes or arguments without naming them."""
_HOOKS = {"__setattr__", "__getattr__", "__getattribute__"}
_REGISTERING = {"register_buffer", "register_parameter", "register_module", "add_module"}
"""Methods of ``nn.Module`` that call nothing of the class."""


def only_kept(cls: Any) -> Mapping[str, str]:
    """Return the arguments that the constructor of a library's class only keeps, with the attribute of each.

    It may ask whether one is None. Nothing that helps the constructor reads such an attribute, nor gets the
    module itself. Somebody's own class may be followed further than that: it has none.
    """
    bases = tuple(methods.bases(cls))
    constructors = tuple(vars(base)["__init__"] for base in bases if "__init__" in vars(base))
    plain = all(type(one) is types.FunctionType and not hasattr(one, "__wrapped__") for one in constructors)
    if type(cls) is not type or not plain or is_followed(cls) or "__init__" not in vars(cls):
        return {}
    return _only_kept(cls, constructors)


@functools.lru_cache(maxsize=4096)
def _only_kept(cls: Any, constructors: tuple[types.FunctionType, ...]) -> Mapping[str, str]:
    """As `only_kept`, for the ``constructors`` that a class and its bases have now."""
    packages = {methods.package(base.__module__) for base in methods.bases(cls)}
    constructing = methods.constructing(cls)
    everything = any(not methods.names_in(one).isdisjoint(_EVERYTHING) for one in constructing)
    if len(packages) > 1 or everything or cls.__new__ is not object.__new__:
        return {}
    own = methods.by_name(cls)
    of_torch = [base for base in cls.__mro__ if base.__module__.startswith("torch.")]
    if not _HOOKS.isdisjoint(own) or of_torch != [nn.Module]:  # Linear, say, calls what a class overrides
        return {}
    its_own = {*constructors, *itertools.chain.from_iterable(methods.methods_by_name(cls).values())}
    if any(_hands_itself_on(one.__code__, own) for one in constructing if one in its_own):
        return {}
    read = {step.attribute for one in constructing for code in codes(one.__code__) for step in steps(code)}
    kept = _kept(constructors[0].__code__)
    return {name: attribute for name, attribute in kept.items() if attribute not in read}


def _hands_itself_on(code: types.CodeType, own: Mapping[str, Any]) -> bool:
    """Whether a method does something else with its object than to take or assign plain attributes of it."""
    first, done = code.co_varnames[0] if code.co_argcount else None, steps(code)
    if first in code.co_cellvars:
        return True
    for at, step in enumerate(done):
        # The others of a base's methods may be overridden, and so are not looked at.
        if step.loads == "super" and all(one.value != "__init__" for one in done[at + 1 : at + 4]):
            return True
        if step.loads == first and not _is_plain_use(done[at + 1], own):
            return True
    return False


def _is_plain_use(step: Step, own: Mapping[str, Any]) -> bool:
    """Whether a step assigns or takes an attribute of a module, and runs nothing but what its name says."""
    name, held = step.value, own.get(step.value)
    if step.name == "STORE_ATTR":
        return not hasattr(type(held), "__set__")
    if step.name.startswith("LOAD_SUPER"):
        return bool(name == "__init__")
    if not step.name.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        return False
    if name not in own:
        return not hasattr(nn.Module, name) or name in _REGISTERING or name == "__class__"
    function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
    if type(function) is not types.FunctionType:
        return not hasattr(type(held), "__get__")
    # A method that is not called there may be taken elsewhere, and its object with it.
    return not hasattr(function, "__wrapped__") and (isinstance(held, property) or step.is_method)


def _kept(code: types.CodeType) -> dict[str, str]:
    done, names = steps(code), code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    changing = {*code.co_cellvars, *(name for _, name in rebound(done))}
    found: dict[str, str] = {}
    for name in set(names) - changing:
        uses = [
            _attribute(done[at + 1 : at + 3], code.co_varnames[0])
            for at, step in enumerate(done)
            if step.loads == name
        ]
        attributes = {one for one in uses if one}
        if None not in uses and len(attributes) == 1:
            found[name] = attributes.pop()
    return found


def _attribute(after: tuple[Step, ...], module: str) -> str | None:
    """The attribute that a value is assigned to; "" where it is compared with None; None for all else."""
    following, last = after
    if following.loads == module and last.name == "STORE_ATTR":
        return str(last.value)
    compared = following.name.endswith("NONE") or (last.name == "IS_OP" and following.value is None)
    return "" if compared else None
