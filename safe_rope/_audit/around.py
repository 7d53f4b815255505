"""What stands around a module's forward: hooks, and what somebody has put in its place."""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base import changes, instructions, methods
from safe_rope._base.functions import signature_of
from safe_rope._recognition.ask import UnansweredError, answering
from safe_rope._recognition.outside import OutOfReachError
from safe_rope._recognition.tables import is_librarys
from safe_rope._recognition.untouched import Untouched

_OURS = "safe_rope."
_BARE = nn.Module()


class Hook(NamedTuple):
    """A hook of a module's forward, and how it is called."""

    function: Any
    is_before: bool
    with_kwargs: bool


def hooks_of(module: nn.Module) -> list[Hook]:
    """Return the hooks that may change what a forward takes, reads or returns; no library's, and no log's."""
    found = []
    for before, hooks, keywords in (
        (True, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (False, module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key, function in hooks.items():
            if not (_is_librarys(function) or _only_looks(function)):
                found.append(Hook(function, before, key in keywords))
    return found


def own_forward(module: nn.Module) -> Any:
    """Return what somebody has put into a module in the place of its forward, without libraries' wrappers."""
    value: Any = vars(module).get("forward")
    while value is not None and not _is_of_class(value, module) and _is_librarys(value):
        value = getattr(value, "_torchdynamo_orig_callable", getattr(value, "__wrapped__", None))
    is_stock = getattr(value, "__self__", None) is module and value.__func__ is type(module).forward
    return None if is_stock else value


def _is_of_class(function: Any, module: nn.Module) -> bool:
    """Whether a function or method is a forward of a module's class, which libraries may have decorated."""
    function = getattr(function, "__func__", function)
    return any(vars(cls).get("forward") is function for cls in type(module).__mro__)


def stands_around(module: nn.Module, built: nn.Module | None) -> bool:
    """Whether something decides what a module answers that its class has not put there.

    Args:
        module: any module.
        built: what its constructor makes, where that is known.

    """
    own = () if built is None else (own_forward(built), *(one.function for one in hooks_of(built)))
    found = (own_forward(module), *(one.function for one in hooks_of(module)))
    return not {_code(one) for one in found if one is not None} <= set(map(_code, own))


def is_of_constructors(module: nn.Module, classes: Iterable[type]) -> bool:
    """Whether all that stands around a forward is in the constructors of a model's classes."""
    found = (own_forward(module), *(one.function for one in hooks_of(module)))
    functions = (function for cls in classes for function in methods.constructing(cls))
    known = {code for function in functions for code in instructions.codes(function.__code__)}
    return {_code(one) for one in found if one is not None} <= known


def _code(function: Any) -> Any:
    return getattr(getattr(function, "__func__", function), "__code__", function)


def _is_librarys(function: Any) -> bool:
    """Whether a function, or what a wrapper runs, is one of torch's, an engine's or ours; not autocast."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", "")) or ""
    if code == torch.amp.autocast_mode.__name__:
        return False
    return is_librarys(types.SimpleNamespace(__module__=code)) or str(code).startswith(_OURS)


def _only_looks(function: Any) -> bool:
    """Whether a function returns None and changes nothing of what it is given."""
    is_bound = isinstance(function, types.MethodType)
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    if methods.names_in(function) & {"setattr", "vars", "copy_"}:
        return False
    done = instructions.steps(code)
    ends = [last for last, one in itertools.pairwise(done) if one.name == "RETURN_VALUE"]
    ends += [one for one in done if one.name == "RETURN_CONST"]
    is_silent = all("CONST" in one.name and one.value is None for one in ends)
    if not is_silent or changes.writes_to_arguments(code, is_bound):
        return False
    module = code.co_varnames[is_bound : is_bound + 1]
    return not any(_hands_on(inner, module) for inner in instructions.codes(code))


def _hands_on(code: types.CodeType, module: tuple[str, ...]) -> bool:
    """Whether code does more with the module in a variable than to read an attribute that torch has not."""
    done = [*instructions.steps(code), None]
    return any(
        one is not None and one.loads in module and (then is None or _is_torchs(then.attribute))
        for one, then in itertools.pairwise(done)
    )


def _is_torchs(attribute: str | None) -> bool:
    return attribute is None or (attribute not in ("__class__", "training") and hasattr(_BARE, attribute))


def surround(module: nn.Module, duplicate: nn.Module, own: Callable[[Any], Any]) -> None:
    """Let a copy of a module answer as the module does: with its hooks, and with what is its forward.

    Args:
        module: what was copied.
        duplicate: the copy.
        own: what makes copies of what a function holds.

    Raises:
        UnansweredError: they are no plain functions, or hold other modules.

    """
    found, hooks = own_forward(module), hooks_of(module)
    if found is None and not hooks:
        return
    forward = types.MethodType(type(duplicate).forward, duplicate) if found is None else None
    forward = _alone(found, module, duplicate, own) if forward is None else forward
    hooks = [one._replace(function=_alone(one.function, module, duplicate, own)) for one in hooks]
    functions = [getattr(one, "__func__", one) for one in (forward, *(hook.function for hook in hooks))]

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            with Untouched(type(duplicate), functions) as untouched:
                return untouched.run(_call, duplicate, forward, hooks, *_as_positional(forward, args, kwargs))
        except OutOfReachError as error:
            raise UnansweredError(str(error)) from error

    vars(duplicate)["forward"] = called


def _alone(function: Any, module: nn.Module, duplicate: nn.Module, own: Callable[[Any], Any]) -> Any:
    """Return a function that has the copy where another has the module."""
    if isinstance(function, types.MethodType) and function.__self__ is module:
        return types.MethodType(_alone(function.__func__, module, duplicate, own), duplicate)
    if _is_of_class(function, module):
        return function
    name = str(getattr(function, "__qualname__", type(function).__qualname__))

    def held(value: Any) -> Any:
        if isinstance(value, types.MethodType) and _is_context(value.__self__):
            return types.MethodType(value.__func__, copy.copy(value.__self__))
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            return _alone(value, module, duplicate, own)
        if isinstance(value, nn.Module) and value is not module:
            raise UnansweredError(f"{name}, which stands around its forward, holds a module")
        return copy.copy(value) if _is_context(value) else own(value)

    if isinstance(function, functools.partial):
        keywords = {name: held(value) for name, value in function.keywords.items()}
        return functools.partial(held(function.func), *map(held, function.args), **keywords)
    if not isinstance(function, types.FunctionType):
        raise UnansweredError(f"{name}, which stands around its forward, is no function that can run alone")
    closure, defaults = function.__closure__, function.__defaults__
    if not (closure or defaults or function.__kwdefaults__):
        return function
    empty = types.CellType()
    cells = (one if one == empty else types.CellType(held(one.cell_contents)) for one in closure or ())
    other = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        None if defaults is None else tuple(map(held, defaults)),
        None if closure is None else tuple(cells),
    )
    other.__kwdefaults__ = {name: held(value) for name, value in (function.__kwdefaults__ or {}).items()}
    return other


def _is_context(value: Any) -> bool:
    """Whether a value is one of torch's context managers, such as ``no_grad()``, and not a class of those."""
    return not isinstance(value, type) and hasattr(value, "__enter__") and is_librarys(type(value))


def _as_positional(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call's arguments, given by their places where that is possible: a hook may see those alone."""
    with answering("forward raised"):
        bound = signature_of(forward).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def _call(
    duplicate: nn.Module, forward: Callable[..., Any], hooks: list[Hook], args: Any, kwargs: Any
) -> Any:
    for hook in (one for one in hooks if one.is_before):
        if hook.with_kwargs:
            given = hook.function(duplicate, args, kwargs)
            args, kwargs = (args, kwargs) if given is None else given
        else:
            given = hook.function(duplicate, args)
            args = args if given is None else given if isinstance(given, tuple) else (given,)
    answer = forward(*args, **kwargs)
    for hook in (one for one in hooks if not one.is_before):
        more = (args, kwargs) if hook.with_kwargs else (args,)
        changed = hook.function(duplicate, *more, answer)
        answer = answer if changed is None else changed
    return answer
