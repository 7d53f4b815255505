"""What code changes in place: what its object keeps between two calls, and what it is given."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator

from safe_rope._base import instructions
from safe_rope._base.methods import (
    by_name,
    functions_behind,
    methods_of,
    names_of,
    reached,
    reached_by_forward,
)

_STORING = {"register_buffer", "setattr", "__dict__", "vars"}
CHANGING = {"append", "extend", "insert", "pop", "update", "setdefault", "add", "clear"}


def stores_when_called(cls: type) -> bool:
    """Whether ``forward``, or a method that it names, may change what is kept between two calls."""
    own = by_name(cls)
    functions = reached(functions_behind(own.get("forward")), own, beside=False)
    return any(changes_what_is_kept(function.__code__) for function in functions)


@functools.lru_cache(maxsize=4096)
def changed_when_called(cls: type) -> frozenset[str]:
    """Names of the attributes that methods other than the constructor assign, delete or change in place."""
    return _all_changed(methods_of(cls))


@functools.lru_cache(maxsize=4096)
def changed_by_forward(cls: type) -> frozenset[str]:
    """Names of the attributes that ``forward``, or what it calls, assigns, deletes or changes in place."""
    return _all_changed(reached_by_forward(cls))


@functools.lru_cache(maxsize=4096)
def changes_what_is_kept(code: types.CodeType) -> bool:
    """Whether a method assigns an attribute or a buffer, or changes in place what its object holds."""
    if names_of(code) & _STORING:
        return True
    first = code.co_varnames[0] if code.co_argcount else ""
    return any(_changes_what(inner, first) for inner in instructions.codes(code))


def _changes_what(code: types.CodeType, first: str) -> bool:
    """Whether code assigns an attribute, changes what ``first`` holds or a container that it has not made."""
    done, own = instructions.steps(code), {*code.co_varnames, *code.co_cellvars}
    for one, whole in with_what_it_changes(done):
        if one.name == "STORE_ATTR":
            return True
        if whole is None:
            continue
        variable, by_attribute = instructions.source(done, whole)
        if variable == first and (by_attribute or one.attribute is None):
            return True
        if variable is not None and one.attribute is None and variable not in own:
            return True
    return False


def _all_changed(functions: Iterable[types.FunctionType]) -> frozenset[str]:
    codes = (code for function in functions for code in instructions.codes(function.__code__))
    return frozenset(name for code in codes for name in _attributes_changed(code))


def _attributes_changed(code: types.CodeType) -> Iterator[str]:
    done = instructions.steps(code)
    if names_of(code) & _STORING:
        yield from (one for one in code.co_consts if isinstance(one, str))
    for one, whole in with_what_it_changes(done):
        if one.name in ("STORE_ATTR", "DELETE_ATTR"):
            yield one.value
        while whole is not None and whole >= 0 and (name := done[whole].attribute) is not None:
            yield name  # of ``self.seen.data.add_(1)``, both
            whole -= 1


def writes_to_arguments(code: types.CodeType, first: int = 0) -> bool:
    """Whether a function changes in place what it is given, as ``q.mul_(cos)``, ``q *= cos`` or ``out=``.

    ``first``: the first argument that counts.
    """
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    own: Collection[str] = code.co_varnames[first : code.co_argcount + code.co_kwonlyargcount + has_more]
    if "out" in own or any("out" in one for one in code.co_consts if isinstance(one, tuple)):
        return True
    done = instructions.steps(code)
    own = instructions.views(done, own)
    for at, (one, whole) in enumerate(with_what_it_changes(done)):
        if whole is not None and instructions.source(done, whole)[0] in own:
            return True
        if instructions.is_in_place(one) and at + 1 < len(done) and done[at + 1].value in own:
            return True
    return False


def with_what_it_changes(
    done: tuple[instructions.Step, ...],
) -> Iterator[tuple[instructions.Step, int | None]]:
    """Yield each step, and where what it changes was put on the stack; None where it changes nothing."""
    writing = {one.attribute for one in done if one.attribute is not None and _is_writing(one.attribute)}
    for at, one in enumerate(done):
        yield one, instructions.changed(done, at, writing)


def _is_writing(method: str) -> bool:
    """Whether a method of this name changes what it is of: a container's, or torch's in place."""
    return method in CHANGING or (method.endswith("_") and not method.endswith("__"))
