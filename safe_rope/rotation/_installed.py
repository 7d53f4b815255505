"""Keep an architecture's application function FP32-aware for as long as a protected model needs it.

This is the one change that outlives the guard. A plain function stays the object that it is, under its name
and wherever somebody holds a reference to it: what it runs is replaced. So a model that keeps it as an
attribute is copied and pickled as a stock one, also in a process without a guard. A module into which a
library has made a function stays that object too, and gets another class. What is neither (a scripted
function, a closure of a kernel library) is replaced under its name.

Every function counts the modules that need it; what it ran before is put back when the last one is gone,
unless somebody else has changed it meanwhile.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from safe_rope._base.functions import signature_of
from safe_rope._base.replaced import Replaced
from safe_rope._base.torch_private import is_compiler_at_work, is_exporting
from safe_rope._base.uninterrupted import uninterrupted
from safe_rope.rotation import fp32_application, runs_as_stock
from safe_rope.rotation._plain_code import OURS

# Re-entrant, because a finalizer can run in the middle of an acquisition in the same thread.
_lock = threading.RLock()
_installed: dict[Any, _Replacement] = {}
_GLOBAL = f"{OURS}{{}}"


class _Replacement:
    """What is FP32-aware now, and how many modules need it."""

    users = 0
    application: Callable[..., Any]

    def put_back(self) -> None:
        """Undo the replacement, unless somebody else has replaced it meanwhile."""
        raise NotImplementedError

    def is_in_place(self) -> bool:
        raise NotImplementedError


class _OwnCode(_Replacement):
    """A plain function, which runs the FP32-aware one: its code is replaced, the object stays."""

    def __init__(self, function: types.FunctionType, *, of_class: bool = False) -> None:
        self.function = function
        self.code = function.__code__
        self.wrapped = vars(function).get("__wrapped__")
        stock = types.FunctionType(
            self.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        stock.__kwdefaults__ = function.__kwdefaults__
        stock.__qualname__, stock.__module__ = function.__qualname__, function.__module__
        self.name = _GLOBAL.format(f"{id(function):x}")
        function.__globals__[self.name] = self.application = fp32_application(stock, of_class=of_class)
        self.ours = _calling(self.name, stock)
        function.__code__ = self.ours
        vars(function)["__wrapped__"] = stock

    def put_back(self) -> None:
        self.function.__globals__.pop(self.name, None)
        if self.function.__code__ is not self.ours:
            return
        self.function.__code__ = self.code
        if self.wrapped is None:
            vars(self.function).pop("__wrapped__", None)
        else:
            vars(self.function)["__wrapped__"] = self.wrapped

    def is_in_place(self) -> bool:
        return self.function.__code__ is self.ours


class _OwnClass(_Replacement):
    """A module that stands for a function, as Hugging Face's ``kernels`` makes one: its class is replaced.

    What it runs may be replaced in it as well, by another kernel, which then gets FP32 like the function. A
    copy gets another such class, which stays; a pickled one is the stock module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.stock = stock = type(module)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._wrap_what_it_runs()
            return self.application(*args, **kwargs)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.application(*args, **kwargs)

        def deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
            made = memo[id(module)] = stock.__new__(stock)
            vars(made).update(copy.deepcopy(vars(module), memo))
            _OwnClass(made)
            return made

        vars(forward)["__signature__"] = signature_of(stock.forward)
        self._forward = forward
        self._runs: Any = None
        self._wrap_what_it_runs()
        of_stock = (stock, object, None)
        self.ours = type(
            stock.__name__,
            (stock,),
            {
                "__module__": stock.__module__,
                "__qualname__": stock.__qualname__,
                "__call__": call,
                "forward": forward,  # Dynamo before torch 2.8 runs it past any __call__
                "__wrapped__": property(lambda module: self._own()),
                "__deepcopy__": deepcopy,
                "__reduce_ex__": lambda module, _: (copyreg._reconstructor, of_stock, vars(module)),  # type: ignore[attr-defined]
            },
        )
        module.__class__ = self.ours

    def _own(self) -> Callable[..., Any]:
        """Return what the module runs: the forward of its stock class, unless another stands in it."""
        own = vars(self.module).get("forward")
        if own is None or getattr(own, "__func__", None) is self._forward:
            return types.MethodType(self.stock.forward, self.module)
        return own  # type: ignore[no-any-return]

    def _wrap_what_it_runs(self) -> None:
        """Make what the module runs FP32-aware, where that is not what it ran before."""
        own = self._own()
        runs = getattr(own, "__func__", own)
        if runs is self._runs:
            return

        def called(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)  # a try of what it computes is no call for a hook to see

        vars(called)["__signature__"] = signature_of(own)
        self.application, self._runs = fp32_application(called, trusted=True), runs

    def put_back(self) -> None:
        if self.is_in_place():
            self.module.__class__ = self.stock

    def is_in_place(self) -> bool:
        return type(self.module) is self.ours


class _Name(_Replacement):
    """Whatever else can be called: another function stands under its name."""

    def __init__(self, owner: Any, attribute: str, stock: Callable[..., Any]) -> None:
        self.owner, self.attribute = owner, attribute
        self.application = fp32_application(stock)
        self._replaced = Replaced()
        # What a class binds to itself, or to nothing, is bound already.
        is_bound = isinstance(vars(owner).get(attribute), classmethod | staticmethod)
        self._replaced.put(owner, attribute, staticmethod(self.application) if is_bound else self.application)

    def put_back(self) -> None:
        self._replaced.put_back()

    def is_in_place(self) -> bool:
        return getattr(self.owner, self.attribute, None) is self.application


Places = Iterable[tuple[str, str]]
"""Names of Python modules, and of functions in them (dotted, for a method of a class)."""


@uninterrupted()
def acquire(user: object, places: Places) -> None:
    """Keep the functions at ``places`` FP32-aware until ``user`` is garbage-collected."""
    with _lock:
        keys = []
        for place in places:
            key = _install(*_find(*place))
            if key is not None and key not in keys:
                keys.append(key)
                _installed[key].users += 1
        weakref.finalize(user, _release, keys).atexit = False


def _install(owner: Any, attribute: str) -> Any:
    """Make what stands there FP32-aware; return the key of the replacement, None where nothing stands."""
    # Whatever stands there now is the function to replace: a kernel library may have replaced the stock one.
    current = getattr(owner, attribute, None)
    if current is None:
        return None
    key = _key(owner, attribute, current)
    known = _installed.get(key)
    if known is not None and known.is_in_place():
        return key
    replacement: _Replacement
    if isinstance(current, nn.Module):
        replacement = _OwnClass(current)
    else:
        is_plain = isinstance(key, types.FunctionType)
        of_class = isinstance(current, types.MethodType)
        replacement = _OwnCode(key, of_class=of_class) if is_plain else _Name(owner, attribute, current)
    replacement.users = 0 if known is None else known.users
    _installed[key] = replacement
    return key


def _key(owner: Any, attribute: str, current: Any) -> Any:
    """Return what tells a replacement: the module or the plain function that is called, or its place."""
    called = current.__func__ if isinstance(current, types.MethodType) else current
    is_plain = isinstance(called, types.FunctionType) and not called.__closure__
    return called if is_plain or isinstance(called, nn.Module) else (owner, attribute)


def _find(module_name: str, name: str) -> tuple[Any, str]:
    """Return what holds an application function, and under which name; None where it does not exist."""
    owner: Any = sys.modules.get(module_name)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = vars(owner).get(part) if owner is not None else None
    return owner, attribute


_PASSED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}


def _calling(name: str, stock: types.FunctionType) -> types.CodeType:
    """Return code that takes what ``stock`` takes and passes it to the global ``name``."""
    given = signature_of(stock, follow_wrapped=False).parameters.values()
    bare = [parameter.replace(default=parameter.empty, annotation=parameter.empty) for parameter in given]
    passed = ", ".join(_PASSED.get(parameter.kind, "{0}").format(parameter.name) for parameter in bare)
    scope: dict[str, Any] = {}
    # Names of parameters and one of ours, nothing else. The defaults belong to the function, not to its code.
    exec(f"def call{inspect.Signature(bare)}:\n    return {name}({passed})", scope)
    ours: types.CodeType = scope["call"].__code__
    code = stock.__code__
    return ours.replace(
        co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
    )


class _NextCollection:
    """Garbage from the start: what is tied to it happens when the garbage collector runs again."""

    def __init__(self) -> None:
        self.cycle = self


@uninterrupted()
def _release(keys: Iterable[Any]) -> None:
    if is_compiler_at_work() or is_exporting():  # an export makes guards after Dynamo's contexts have closed
        # Dynamo may be tracing one of these functions: nothing is swapped before the next collection.
        weakref.finalize(_NextCollection(), _release, keys).atexit = False
        return
    with _lock:
        for key in keys:
            replacement = _installed[key]
            replacement.users -= 1
            if not replacement.users:
                del _installed[key]
                replacement.put_back()


def installed(places: Places) -> bool:
    """Whether every function at ``places`` that exists is FP32-aware at this moment."""
    return all(known is not None and known.is_in_place() for _, known in _standing(places))


def as_stock(places: Places) -> tuple[bool, list[str]]:
    """Whether no function at ``places`` rotates in FP32, and the names of those that run as in stock."""
    standing = [(name, known) for name, known in _standing(places) if known is not None]
    names = [name for name, known in standing if runs_as_stock(known.application)]
    return len(names) == len(standing), list(dict.fromkeys(names))


def _standing(places: Places) -> Iterator[tuple[str, _Replacement | None]]:
    """Yield the name of each function that exists at ``places``, and what has been made of it."""
    for module_name, name in places:
        owner, attribute = _find(module_name, name)
        current = getattr(owner, attribute, None)
        if current is not None:
            yield name, _installed.get(_key(owner, attribute, current))


def exists(module_name: str, name: str) -> bool:
    """Whether there is a function of that name to make FP32-aware."""
    owner, attribute = _find(module_name, name)
    return getattr(owner, attribute, None) is not None
