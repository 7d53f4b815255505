"""Truthful tensor constructors inside ``deepspeed.zero.Init`` and ``deepspeed.OnDevice``.

zero.Init replaces ``torch.{tensor,empty,zeros,ones,full,arange,eye,randn}`` and ``torch.Tensor.__new__`` by
functions that lower every floating result to the model's dtype; OnDevice does so with some of them. While a
`ConstructorGuard` is open, each has a second wrapper around it that honours an explicit ``dtype``; all else
goes on to DeepSpeed's.

Everything that is private to DeepSpeed and that safe_rope relies on is named in this package. DeepSpeed is
found in ``sys.modules`` or waited for with a post-import hook; it is never imported from here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import wrapt

from safe_rope._base.replaced import Replaced
from safe_rope._base.torch_private import TRUE_NEW
from safe_rope._base.uninterrupted import uninterrupted
from safe_rope._base.version import installed
from safe_rope.constructors import _shadow, _surroundings
from safe_rope.constructors._imported import LEFT, as_imported_from_torch, has_lowered, is_lowering
from safe_rope.constructors._truthful import (
    CONSTRUCTORS,
    NOT_LOWERED,
    Lowering,
    Session,
    Target,
    is_deepspeeds,
    new_tensor,
)
from safe_rope.errors import IncompatibleVersionError

__all__ = [
    "CONSTRUCTORS",
    "LEFT",
    "ConstructorGuard",
    "as_imported_from_torch",
    "has_lowered",
    "interception_active",
    "is_lowering",
    "lowering",
    "pristine",
    "unpartitioned",
]

_MODULE = "deepspeed.runtime.zero.partition_parameters"
_CLASS = "InsertPostInitMethodToModuleSubClasses"
_ADD, _REMOVE = "_add_tensor_creation_wrappers", "_remove_tensor_creation_wrappers"
_DEPTH = "zero_init_context"
_ORIGINAL = "_orig_torch_{}"
_ENTERED = "_ds_child_entered"
_ON_DEVICE_MODULE, _ON_DEVICE = "deepspeed.utils.init_on_device", "OnDevice"

_lock = threading.RLock()


# ---- DeepSpeed -----------------------------------------------------------------------------------------


def _deepspeed() -> ModuleType | None:
    """Return DeepSpeed's module if it is imported.

    Raises:
        IncompatibleVersionError: it lacks one of the names that this file relies on.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return None
    cls = getattr(module, _CLASS, None)
    missing = [name for name in (_DEPTH, *map(_ORIGINAL.format, CONSTRUCTORS)) if not hasattr(module, name)]
    if cls is None:
        missing.append(_CLASS)
    else:
        missing += [f"{_CLASS}.{name}" for name in (_ADD, _REMOVE) if name not in vars(cls)]
    if missing:
        version = installed(("deepspeed",)).get("deepspeed", "of unknown version")
        raise IncompatibleVersionError(
            f"safe_rope hooks {', '.join(missing)} in {_MODULE}, and deepspeed {version} has no such name; "
            "install a deepspeed between 0.14.5 and 0.19.8, or a newer safe_rope"
        )
    return module


def _lowers(module: ModuleType | None) -> bool:
    """Whether constructors of zero.Init or OnDevice stand in torch now.

    `shutdown_init_context` takes them away in an open zero.Init; somebody may have wrapped them in one.
    """
    found = [vars(owner).get(name) for owner, name, _ in _replaced(module)] if module is not None else []
    is_open = getattr(module, _DEPTH, 0) > 0
    return any(is_open or is_deepspeeds(getattr(function, "__globals__", {})) for function in found)


def _replaced(module: ModuleType) -> Iterator[Target]:
    """Yield every constructor in whose place something else stands now."""
    for name in CONSTRUCTORS:
        original = getattr(module, _ORIGINAL.format(name))
        if getattr(torch, name) is not original:
            yield Target(torch, name, original)
    if torch.Tensor.__new__ is not TRUE_NEW:
        yield Target(torch.Tensor, "__new__", new_tensor)


def _on_import(module: ModuleType) -> None:
    with _lock:
        if _state.opens:
            _state.hook()


@uninterrupted()
def _after_add(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    with _lock:
        _state.begin()
        if _state.session is not None:
            _state.session.track()
    return result


before_exit: list[Callable[[], None]] = []
"""Called when a zero.Init or an OnDevice is about to take its constructors away."""


@uninterrupted()
def _after_remove(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    for listen in tuple(before_exit):
        listen()
    try:
        return wrapped(*args, **kwargs)
    finally:
        with _lock:
            _state.begin()  # an OnDevice inside zero.Init leaves that open


# ---- the guard -----------------------------------------------------------------------------------------


class _State:
    """Of the whole process; every method is called with the lock held."""

    def __init__(self) -> None:
        self.opens = 0
        self.pristines = 0
        self.hooks = Replaced()
        self.awaits_import = False
        self.session: Session | None = None

    def open(self) -> None:
        self.opens += 1
        try:
            if self.opens == 1:
                self.hook()
            self.join()
            if self.session is not None:
                self.session.track()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.opens -= 1
        if self.opens == 0:
            self.hooks.put_back()
            self.leave()

    def hook(self) -> None:
        """Wrap the DeepSpeed methods that put the constructors in place and take them away."""
        module = _deepspeed()
        if module is not None:
            init = getattr(module, _CLASS)
            on_device = getattr(sys.modules.get(_ON_DEVICE_MODULE), _ON_DEVICE, None)
            for cls, add, remove in ((init, _ADD, _REMOVE), (on_device, "__enter__", "__exit__")):
                for name, wrapper in ((add, _after_add), (remove, _after_remove)):
                    if cls is not None:
                        self.hooks.put(cls, name, wrapt.FunctionWrapper(vars(cls)[name], wrapper))
        elif not self.awaits_import:  # wrapt cannot take a hook off again, so there is only ever one
            wrapt.register_post_import_hook(_on_import, _MODULE)
            self.awaits_import = True

    def join(self) -> None:
        """Cover the constructors of an Init or an OnDevice that is open already."""
        if self.session is None:
            self.begin()
        if self.session is not None:
            self.session.truthful = self.opens > 0

    def leave(self) -> None:
        if self.session is None:
            return
        self.session.truthful = self.opens > 0
        if not self.opens and not self.pristines:
            self.end()

    def begin(self) -> None:
        self.end()
        module = _deepspeed()
        if module is None or not (self.opens or self.pristines) or not _lowers(module):
            return
        session = Session()
        session.truthful = self.opens > 0
        session.install(list(_replaced(module)))
        self.session = session

    def end(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.remove()


_state = _State()


class ConstructorGuard:
    """Makes the tensor constructors honour an explicit dtype inside zero.Init.

    Any order with zero.Init and with the import of deepspeed, any number of guards, any thread. One guard
    can be opened several times; it must be closed as often. When the last guard of the process closes, every
    global that was replaced is the original object again.
    """

    def __init__(self) -> None:
        self._opens = 0

    def open(self) -> None:
        """Open the guard.

        Raises:
            IncompatibleVersionError: the installed deepspeed lacks what there is to hook; nothing changed.
        """
        with _lock:
            _shadow.tidy()
            _state.open()
            self._opens += 1

    def close(self) -> None:
        """Undo one `open`.

        Raises:
            RuntimeError: the guard is not open.
        """
        with _lock:
            if self._opens == 0:
                raise RuntimeError("expected an open ConstructorGuard, got a closed one; call open() first")
            self._opens -= 1
            _state.close()
            _shadow.tidy()

    def __enter__(self) -> ConstructorGuard:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def interception_active() -> bool:
    """Whether a constructor called from this thread now is zero.Init's with ours around it."""
    session = _state.session
    return session is not None and session.truthful and not _surroundings.thread.depth


def lowering() -> Lowering:
    """What an open zero.Init or OnDevice makes of tensors that this thread makes without a dtype."""
    session = _state.session
    return session.lowering() if session is not None and not _surroundings.thread.depth else NOT_LOWERED


@contextmanager
def pristine(follow: bool = True) -> Iterator[None]:
    """Nothing is intercepted in this thread: plain constructors, CPU, FP32 by default, autocast off.

    For the constructor of a position module and whenever its tables are rebuilt. Re-entrant, independent of
    any guard or zero.Init. The gradient mode stays as it is. A parameter made inside gets the dtype that it
    would have got outside, rounded once from what was computed here; with ``follow=False`` it stays as it is.
    A signal waits until the section ends (`safe_rope._base.uninterrupted`).
    """
    with uninterrupted():
        with _lock:
            _shadow.tidy()
            _state.pristines += 1
            try:
                _state.join()
            except BaseException:
                _state.pristines -= 1
                raise
        try:
            with _surroundings.surroundings(), _followed_dtypes() if follow else _unfollowed():
                yield
        finally:
            with _lock:
                _state.pristines -= 1
                _state.leave()


@contextmanager
def _unfollowed() -> Iterator[None]:
    before, _surroundings.thread.follow = _surroundings.thread.follow, False
    try:
        yield
    finally:
        _surroundings.thread.follow = before


class _EnteredAlready:
    """What zero.Init looks for on a module that it is not to partition: there, for one thread."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __get__(self, module: Any, cls: type) -> bool:
        if threading.get_ident() in self.threads:
            return True
        raise AttributeError(_ENTERED)


_entered = _EnteredAlready()


@contextmanager
def unpartitioned() -> Iterator[None]:
    """Modules that this thread builds inside are left alone by an open zero.Init: nothing is partitioned."""
    with _lock:
        if not _entered.threads:
            setattr(torch.nn.Module, _ENTERED, _entered)
        _entered.threads.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _entered.threads.remove(threading.get_ident())
            if not _entered.threads:
                delattr(torch.nn.Module, _ENTERED)


@contextmanager
def _followed_dtypes() -> Iterator[None]:
    """Follow the dtypes that zero.Init or the replaced default dtype would have given."""
    if _state.session is None and _surroundings.thread.outer_default is None:
        yield
        return
    mode = _shadow.start()
    try:
        yield
    finally:
        _shadow.stop(mode)
