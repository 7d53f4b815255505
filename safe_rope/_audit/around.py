"""What stands around a module's forward: hooks, and what somebody has put in its place."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from safe_rope._base import bytecode, instructions
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
    while value is not None and _is_librarys(value):
        value = getattr(value, "_torchdynamo_orig_callable", getattr(value, "__wrapped__", None))
    is_stock = getattr(value, "__self__", None) is module and value.__func__ is type(module).forward
    return None if is_stock else value


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
    functions = (function for cls in classes for function in bytecode.constructing(cls))
    known = {code for function in functions for code in instructions.codes(function.__code__)}
    return {_code(one) for one in found if one is not None} <= known


def _code(function: Any) -> Any:
    return getattr(getattr(function, "__func__", function), "__code__", function)


def _is_librarys(function: Any) -> bool:
    """Whether a function, or what a wrapper runs, is one of torch's, an engine's or ours."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", "")) or ""
    return is_librarys(types.SimpleNamespace(__module__=code)) or str(code).startswith(_OURS)


def _only_looks(function: Any) -> bool:
    """Whether a function returns None and changes nothing of what it is given."""
    is_bound = isinstance(function, types.MethodType)
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    if bytecode.names_in(function) & {"setattr", "vars", "copy_"}:
        return False
    done = instructions.steps(code)
    ends = [last for last, one in itertools.pairwise(done) if one.name == "RETURN_VALUE"]
    ends += [one for one in done if one.name == "RETURN_CONST"]
    is_silent = all("CONST" in one.name and one.value is None for one in ends)
    if not is_silent or bytecode.writes_to_arguments(code, is_bound):
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
    if not isinstance(function, types.FunctionType):
        name = str(getattr(function, "__qualname__", type(function).__qualname__))
        raise UnansweredError(f"{name}, which stands around its forward, is no function that can run alone")
    if not function.__closure__:
        return function

    def held(value: Any) -> Any:
        if isinstance(value, types.FunctionType | types.MethodType):
            return _alone(value, module, duplicate, own)
        if isinstance(value, nn.Module) and value is not module:
            raise UnansweredError(f"{function.__qualname__}, which stands around its forward, holds a module")
        return own(value)

    empty = types.CellType()
    cells = [one if one == empty else types.CellType(held(one.cell_contents)) for one in function.__closure__]
    code, defaults = function.__code__, function.__defaults__
    other = types.FunctionType(code, function.__globals__, function.__name__, defaults, tuple(cells))
    other.__kwdefaults__ = function.__kwdefaults__
    return other


def _as_positional(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call's arguments, given by their places where that is possible: a hook may see those alone."""
    with answering("forward raised"):
        bound = inspect.signature(forward).bind(*args, **kwargs)
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
