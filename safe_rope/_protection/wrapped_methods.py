"""The methods of ``nn.Module`` that are wrapped while a guard is open, and the watches that they tell.

A constructor tells what a module is built with. A cast, a move and a load tell before they begin, and so does
a call as long as something that was built has not been looked at.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from safe_rope._base.positions import is_watched
from safe_rope._base.replaced import Replaced
from safe_rope._base.torch_private import between_compilations, constant_in_graphs
from safe_rope._base.uninterrupted import uninterrupted
from safe_rope._protection.rewrite import OF_SKIP_INIT
from safe_rope._recognition.rebuild import rebuilding
from safe_rope.constructors._truthful import is_deepspeeds

if TYPE_CHECKING:
    from safe_rope._protection.watch import ConstructionWatch

logger = logging.getLogger(__name__)

watches: list[ConstructionWatch] = []
watches_lock = threading.RLock()
_methods = Replaced()
_USES = ("_apply", "train", "load_state_dict", "state_dict")
# What leads to ``_apply``: a class may have one of its own, and take its tables aside before torch's runs.
_MOVES = (
    *("to", "to_empty", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "share_memory"),
    *("ipu", "xpu", "mtia"),
)
_CONSTRUCTORS = ("__init__", "_old_init")
"""zero.Init keeps the constructor that it replaces under the other name, and puts that back when it ends."""


def watch_of_this_thread() -> ConstructionWatch | None:
    """The innermost guard that this thread opened; where it opened none, the last one opened anywhere."""
    if len(watches) == 1:
        return watches[0]
    thread = threading.get_ident()
    own = [watch for watch in watches if watch._thread == thread]
    return (own or watches or [None])[-1]  # type: ignore[list-item]


def wrap_methods() -> None:
    wraps: dict[str, Callable[..., Any]] = dict.fromkeys(_CONSTRUCTORS, _noting)
    for name in (*_USES, *_MOVES):
        wraps[name] = functools.partial(_looking_before, name)
    _methods.put(nn.Module, "__reduce_ex__", _looking_before_a_copy(nn.Module.__reduce_ex__))
    _methods.put(nn.Module, "__setstate__", _noting_copy(nn.Module.__setstate__))
    for name, wrap in wraps.items():
        inner = nn.Module.__dict__.get(name)
        if inner is not None and inner not in _methods:
            _methods.put(nn.Module, name, wrap(inner))
    if "_old_init_subclass" in vars(nn.Module):
        # A zero.Init that has ended leaves the constructor that a class inherits in the class itself.
        base, ours = inspect.unwrap(nn.Module.__init__), nn.Module.__init__
        # Sigmoid has none of its own: what stands there is somebody's wrapper, in all classes without one.
        left: Any = vars(nn.Sigmoid).get("__init__")
        noting_left = left and _noting(left)
        for cls in _subclasses(nn.Module):
            own = vars(cls).get("__init__")
            if not isinstance(own, types.FunctionType) or is_deepspeeds(own.__globals__):
                continue
            if inspect.unwrap(own) is base:
                _methods.put(cls, "__init__", ours)
            elif own is left:
                _methods.put(cls, "__init__", noting_left)


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = {cls}
    waiting: list[type] = [cls]
    while waiting:
        below: list[type] = waiting.pop().__subclasses__()
        for subclass in below:
            if subclass not in seen:
                seen.add(subclass)
                waiting.append(subclass)
                yield subclass


def is_torchs(module: nn.Module) -> bool:
    """Say whether a module is one of torch's own: most modules are, and none of them holds positions."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _noting(inner: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inner)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return
        for one in watches:
            one.has_seen_a_module = True
        if is_torchs(self):
            return
        watch = None if rebuilding() else watch_of_this_thread()
        if watch is not None:
            try:
                watch.note(self, sys._getframe(1))
            except Exception:
                logger.warning("cannot tell what %s is built with", type(self).__name__, exc_info=True)

    return init


class _ThreadState(threading.local):
    uses: bool = False


_this_thread = _ThreadState()


def _looking_before(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or _this_thread.uses or rebuilding():
            return inner(self, *args, **kwargs)
        stock: Any = type(self)
        own = inspect.unwrap(getattr(stock, name)) is not inspect.unwrap(inner)
        if own and name == "_apply" and not hasattr(stock, "_safe_rope_stock"):
            return inner(self, *args, **kwargs)  # the class's own runs, and is not to begin again
        for watch in tuple(watches):  # each has seen others being built
            watch.before_use(self, is_read=name == "state_dict")
        _this_thread.uses = True  # its children are about to get here, each by itself
        try:
            # What has just been protected may have a method of its own; one of its class's runs already.
            return (inner if own or type(self) is stock else getattr(type(self), name))(self, *args, **kwargs)
        finally:
            _this_thread.uses = False

    return method


def _looking_before_a_copy(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A copy is no module that a constructor has built: what it has to know it takes from its original."""

    @functools.wraps(inner)
    def reduce(self: nn.Module, protocol: Any) -> Any:
        stock = type(self)
        if not (torch.compiler.is_dynamo_compiling() or rebuilding()):
            _look_before_call()
        return inner(self, protocol) if type(self) is stock else self.__reduce_ex__(protocol)

    return reduce


def _noting_copy(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A copy may be filled later, when its original has ended."""

    @functools.wraps(inner)
    def setstate(self: nn.Module, state: Any) -> None:
        inner(self, state)
        if torch.compiler.is_dynamo_compiling() or rebuilding():
            return
        watch = watch_of_this_thread()
        if watch is not None:
            watch.note_copy(self)

    return setstate


_calls = Replaced()
"""A call of any module, wrapped only while something that was built has not been considered."""


def wrap_call() -> None:
    """Wrap calls, unless a thread compiles: Dynamo has read the method, and writes its checks of it later."""
    with watches_lock:
        if not _calls:  # each module that is built asks
            _wrap_call()


@uninterrupted()
def _wrap_call() -> None:
    with between_compilations() as is_free:
        if not is_free:
            return
        inner = nn.Module.__call__

        @functools.wraps(inner)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _look_before_call()
            return inner(self, *args, **kwargs)

        _calls.put(nn.Module, "__call__", call)


@constant_in_graphs
def _look_before_call() -> bool:
    """Have every watch look. Dynamo runs this while it traces, and puts nothing of it into the graph."""
    if not (rebuilding() or is_watched()):
        for watch in tuple(watches):
            watch.before_use()
        if not watches:
            unwrap_call()  # a thread was compiling when the last guard closed
    return True


def unwrap_call() -> None:
    """Put the method back, unless a thread compiles; the next call does it then."""
    with watches_lock, between_compilations() as is_free:
        if is_free:
            _calls.put_back()


def _take_back_apply() -> None:
    """Give torch's ``_apply`` to the classes that a skip_init inside of zero.Init has left ours in."""
    ours: Any = nn.Module._apply
    left: Any = getattr(nn.Sigmoid, OF_SKIP_INIT, None)  # which has no ``_apply`` of its own
    if left is not None and left is ours and left in _methods:
        for cls in (nn.Module, *_subclasses(nn.Module)):
            for name in ("_apply", OF_SKIP_INIT):
                if vars(cls).get(name) is ours:
                    setattr(cls, name, left.__wrapped__)


def unwrap_methods() -> None:
    unwrap_call()
    _take_back_apply()
    # A wrapper that somebody put around ours stays; ours then finds no watch and passes everything through.
    _methods.put_back(moved=_CONSTRUCTORS)
