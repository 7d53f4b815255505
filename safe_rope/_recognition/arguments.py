"""What the constructors of modules are called with: read from their frames, or told by attributes.

An argument is kept as it was when the constructor got it, as far as that can be known: constructors pop
entries, consume iterators and write to their config. Where one may have changed before anybody looked, the
arguments are not `certain`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Collection, Hashable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope._base.functions import signature_of
from safe_rope._base.instructions import changed, rebound, source, steps
from safe_rope.constructors._truthful import is_deepspeeds

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = frozenset({list, tuple, set, dict})
_AS_THEY_ARE = (*_PLAIN, torch.Tensor, nn.Module, type)
_CHANGING = {"pop", "popitem", "update", "setdefault", "clear", "append", "extend", "insert", "remove"}

_MOVING = ("CALL", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF")
"""What may change something that others hold."""


class Arguments(NamedTuple):
    """What a constructor was called with, and whether it is certain that it was."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    certain: bool = True
    complete: bool = True
    """Whether none that is not known is left to its default."""

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for one call: what that call changes, it changes for itself.

        Raises:
            ValueError: an iterator among them cannot be run through again.

        """
        return tuple(map(_revived, self.args)), {name: _revived(value) for name, value in self.kwargs.items()}

    def held(self) -> list[Any]:
        """Return what was given, each object itself."""
        given = (*self.args, *self.kwargs.values())
        return [one.value if isinstance(one, Kept) else one for one in given]

    def key(self, kept: Collection[str] = ()) -> Hashable | None:
        """Return what two calls that make the same tables have in common; None where that cannot be said.

        Of the arguments ``kept`` only the types count.
        """
        named = (type(one) if name in kept and type(one) is int else one for name, one in self.kwargs.items())
        values = (*self.args, *named)
        if any(isinstance(value, nn.Module) for value in values):
            return None
        try:
            return tuple(self.kwargs), tuple(_identity(value) for value in values)
        except Exception:  # noqa: BLE001 - a foreign repr
            return None


class Kept(NamedTuple):
    """An object with the attributes that it had when a constructor got it."""

    value: Any
    attributes: dict[str, Any]


def arguments_in(module: nn.Module, frame: FrameType | None) -> Arguments | None:
    """Read the arguments of the outermost constructor of ``module`` that is running, from its frame."""
    outermost = None
    # The chain of constructors of this object: its own, its bases', and wrappers around each.
    while frame is not None and first_argument(frame) is module:
        # zero.Init's wrapper has the arguments before the constructor has touched them.
        if frame.f_code.co_name == "__init__" or is_deepspeeds(frame.f_globals):
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else _call_of(outermost)


def has_moved(module: nn.Module, frame: FrameType | None) -> bool:
    """Whether a constructor of ``module`` has called or changed anything before that of its base runs."""
    while frame is not None and first_argument(frame) is module:
        if is_deepspeeds(frame.f_globals):  # zero.Init's wrapper around it
            frame = frame.f_back
            continue
        # The last of them runs.
        done = [step for step in steps(frame.f_code) if step.offset <= frame.f_lasti][:-1]
        moves = [step for step in done if step.name.startswith(_MOVING) and "INTRINSIC" not in step.name]
        supers = [step for step in done if step.loads == "super"]
        inlined = [step for step in done if step.name.startswith("LOAD_SUPER")]  # from CPython 3.12 on
        if len(moves) > len(supers) - len(inlined):
            return True
        frame = frame.f_back
    return False


def has_no_constructor(cls: type[nn.Module]) -> bool:
    """Whether a class has none but that of ``nn.Module``, which takes nothing; what fills it comes later."""
    return inspect.unwrap(cls.__init__) is inspect.unwrap(nn.Module.__init__)


def first_argument(frame: FrameType) -> Any:
    """Return the object that a method's frame was called on, or whatever comes first."""
    code = frame.f_code
    if code.co_argcount == 0 and not code.co_flags & inspect.CO_VARARGS:
        return None
    values = frame.f_locals
    first = values.get(code.co_varnames[0])
    _let_go(frame, values)
    if code.co_argcount == 0 and isinstance(first, tuple):
        return first[0] if first else None
    return first


def running(method: str, frame: FrameType | None) -> Iterator[nn.Module]:
    """Yield the modules whose ``method`` runs in a frame and its callers, the innermost first."""
    while frame is not None:
        owner = first_argument(frame) if frame.f_code.co_name == method else None
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back


def _let_go(frame: FrameType, values: Any) -> None:
    # Before Python 3.13 they are a copy that the frame keeps, and with it whatever the caller lets go of.
    if type(values) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()


def _call_of(frame: FrameType) -> Arguments | None:
    values = frame.f_locals
    try:
        return _call_with(frame, values)
    finally:
        _let_go(frame, values)


def _call_with(frame: FrameType, values: dict[str, Any]) -> Arguments | None:
    code = frame.f_code
    names = code.co_varnames
    count, keywords = code.co_argcount, code.co_kwonlyargcount
    rest: tuple[Any, ...] = ()
    more: dict[str, Any] = {}
    at = count + keywords
    if code.co_flags & inspect.CO_VARARGS:
        rest = values.get(names[at], ())
        at += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        more = values.get(names[at], {})
    if any(name not in values for name in names[1 : count + keywords]):
        return None
    if count == 0:
        rest = rest[1:]
    args: tuple[Any, ...] = (*(values[name] for name in names[1:count]), *rest)
    kwargs = {**{name: values[name] for name in names[count : count + keywords]}, **more}
    if count and not rest and code.co_posonlyargcount <= 1:
        args, kwargs = (), {**{name: values[name] for name in names[1:count]}, **kwargs}
    certain = frame.f_lasti < _first_change(code)
    certain = certain and not any(issubclass(type(v), Iterator) for v in (*args, *kwargs.values()))
    return Arguments(tuple(map(_kept, args)), {name: _kept(value) for name, value in kwargs.items()}, certain)


@functools.lru_cache(maxsize=4096)
def _first_change(code: CodeType) -> int:
    """Return the offset of the first instruction that may change an argument: rebind it or write to it."""
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount + flags])
    done = steps(code)
    rebinding = {at for at, name in rebound(done) if name in names}
    for at, one in enumerate(done):
        whole = changed(done, at, _CHANGING)
        if at in rebinding or (whole is not None and source(done, whole)[0] in names):
            return one.offset
    return len(code.co_code) + 1


# ---- arguments as they were ----------------------------------------------------------------------------


def _kept(value: Any) -> Any:
    cls = type(value)  # a configuration answers isinstance slowly
    if issubclass(cls, _AS_THEY_ARE):
        return value
    if cls in _CONTAINERS:
        return copied_container(value)
    if issubclass(cls, Iterator):
        with contextlib.suppress(Exception):  # a generator, say: `fresh` refuses it
            return copy.copy(value)
        return value
    attributes = getattr(value, "__dict__", None)
    if callable(value) or type(attributes) is not dict:
        return value
    # Configurations have dozens of attributes, and most modules have one.
    copied = {**attributes}
    for name in [name for name, held in attributes.items() if type(held) in _CONTAINERS]:
        copied[name] = copied_container(attributes[name])
    return Kept(value, copied)


def copied_container(value: Any) -> Any:
    """Return a container with what it holds now, two levels deep; anything else as it is."""
    if type(value) is dict:
        return {key: copy.copy(held) if type(held) in _CONTAINERS else held for key, held in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copy.copy(held) if type(held) in (list, dict) else held for held in value)
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, Kept):
        duplicate = copy.copy(value.value)
        vars(duplicate).clear()  # of what has come since
        vars(duplicate).update({name: copied_container(held) for name, held in value.attributes.items()})
        return duplicate
    if isinstance(value, Iterator):
        try:
            return copy.copy(value)
        except TypeError as error:
            raise ValueError(
                f"an argument is a {type(value).__name__}, which cannot be run through again"
            ) from error
    return copied_container(value)


def _identity(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, Kept):
        # The same config can be changed between two models that are built from it.
        return id(value.value), repr(value.attributes)
    if isinstance(value, Iterator):
        raise ValueError("an iterator is consumed: no two calls are the same")
    return id(type(value)), repr(value)


# ---- arguments that nobody saw -------------------------------------------------------------------------


def infer_arguments(module: nn.Module, stock: type[nn.Module]) -> Arguments | None:
    """Tell from its attributes what a module was built with; None where they do not say."""
    kwargs, complete = {}, True
    try:
        parameters = list(signature_of(stock.__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in module.__dict__:
            value = module.__dict__[parameter.name]
            if not _is_made_of_a_number(value, parameter.default):
                kwargs[parameter.name] = _kept(value)
            elif float(value) != float(torch.tensor(float(parameter.default), dtype=value.dtype)):
                return None
        elif parameter.default is parameter.empty:
            return None
        else:
            complete &= parameter.name in ("device", "dtype")
    return Arguments((), kwargs, certain=False, complete=complete)


def _is_made_of_a_number(value: Any, default: Any) -> bool:
    """Whether an attribute is a rounded number in a tensor, which its constructor makes of one in Python."""
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype in LOW
    return is_number and type(default) in (int, float) and not value.is_meta
