"""Watch modules being built while a guard is open, and protect each as soon as it is complete.

Two hooks. `torch.nn.Module.__init__` tells what every module is built with, so that its constructor can be
run again with nothing intercepted, whatever its class is and wherever that was defined. And PyTorch's own
hook for registered submodules tells when a module is complete, and its path; what never gets a parent is
looked at when the guard closes.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from safe_rope._protection import Options, Protection, Reference, Unprotectable, concerns, prepare
from safe_rope._rebuild import Arguments, Constructions, Rebuilt, infer_arguments, rebuild, rebuilding
from safe_rope._report import ProtectionReport
from safe_rope._rotary_state import RotaryState
from safe_rope.registry import RopePatch, find
from safe_rope.rewrite import ProtectedModule, settle, stock_class

logger = logging.getLogger(__name__)

Built = Callable[[nn.Module], None]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_watches: list[ConstructionWatch] = []
_watches_lock = threading.RLock()
_wrapped: list[tuple[str, Any, Any]] = []  # a name in nn.Module, what was there, ours


class ConstructionWatch:
    """One guard's view of what is built while it is open."""

    def __init__(self, options: Options, built: Built | None = None) -> None:
        self._options = options
        self._built = built
        self._thread = threading.get_ident()
        self._constructions = Constructions()
        self._rebuilt: dict[Hashable, tuple[Arguments, Rebuilt | Exception]] = {}
        self._states: dict[Hashable, tuple[RopePatch, RotaryState]] = {}
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._refused: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._parents: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        self._handle: Any = None

    def open(self) -> None:
        """Start watching."""
        with _watches_lock:
            self._handle = register_module_module_registration_hook(self._on_registration)
            _watches.append(self)
            if len(_watches) == 1:
                _wrap_init()

    def close(self) -> None:
        """Protect what never got a parent, put every table back, and stop watching."""
        try:
            self.catch_up()
            settle(self._seen)
        finally:
            with _watches_lock:
                self._handle.remove()
                _watches.remove(self)
                if not _watches:
                    _unwrap_init()
            self._rebuilt.clear()
            self._states.clear()

    def catch_up(self) -> None:
        """Protect what was built and never got a parent."""
        for module in self._constructions.waiting():
            self._consider(module)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or rebuilding() or not self._concerns_this_thread():
            return
        torchs = _is_torchs(child)
        if torchs and not child._modules and not isinstance(child, _CONTAINERS):
            return  # a leaf such as Linear is on no path that is asked for
        self._parents[child] = (weakref.ref(parent), name)
        if torchs:
            return
        if isinstance(child, ProtectedModule):
            self._see(child)
        elif _watch_of_this_thread() is self:
            self._consider(child)

    def _consider(self, module: nn.Module) -> None:
        arguments = self._constructions.pop(module)
        if not concerns(module):
            return
        try:
            result = self._prepare(module, arguments)
            if isinstance(result, Protection):
                self._see(module)
                result.carry_out()
        except Exception as error:
            # A model that nobody has described must still be built; the report says what went wrong.
            if find(module) is not None:
                raise
            logger.info("%s cannot be protected", type(module).__name__, exc_info=True)
            self._seen.discard(module)
            result = Unprotectable(module, f"{type(error).__name__}: {error}")
        if isinstance(result, Unprotectable):
            if self._built is not None:
                self._built(module)
            self._refused[module] = result.reason

    def _see(self, module: nn.Module) -> None:
        self._seen.add(module)
        if self._built is not None:
            self._built(module)

    def _prepare(self, module: nn.Module, arguments: Arguments | None) -> Protection | Unprotectable | None:
        parent = self._parents[module][0]() if module in self._parents else None
        around = () if parent is None else (type(parent).__module__,)
        seen = arguments is not None
        arguments = arguments or infer_arguments(module, stock_class(module))
        key = None if arguments is None else _key(type(module), arguments)
        # Before 4.48 every layer had a rotary module of its own: the first tells what becomes of the others.
        known = self._states.get((key, around)) if seen and key is not None else None
        if known is not None:
            return Protection(module, known[0], known[1].of_another(module))
        reference = None if arguments is None else self._reference(module, arguments, key)
        result = prepare(module, reference, around, self._options)
        if isinstance(result, Protection) and result.state and result.patch and seen and key is not None:
            self._states[key, around] = result.patch, copy.deepcopy(result.state)
        return result

    def _reference(self, module: nn.Module, arguments: Arguments, key: Hashable | None) -> Reference | None:
        known = self._rebuilt.get(key) if key is not None else None
        if known is None:
            try:
                known = (arguments, rebuild(type(module), arguments))
            except Exception as error:
                logger.info("%s cannot be built again", type(module).__name__, exc_info=True)
                known = (arguments, error)
            if key is not None:
                self._rebuilt[key] = known  # the arguments stay alive with it, so that ids stay theirs
        return Reference(known[1]) if isinstance(known[1], Rebuilt) else None

    def _concerns_this_thread(self) -> bool:
        return self._thread == threading.get_ident() or _watch_of_this_thread() is self

    def complete(self, report: ProtectionReport) -> None:
        """Add every position module that was built and still exists to ``report``, ordered by path."""
        entries = sorted(((self._path(module), module) for module in self._seen), key=lambda entry: entry[0])
        for path, module in entries:
            report.add(path, module)
        for module, reason in self._refused.items():
            report.add_unprotected(self._path(module), module, reason)

    def _path(self, module: nn.Module) -> str:
        names: list[str] = []
        current: nn.Module | None = module
        while current is not None and current in self._parents:
            parent, name = self._parents[current]
            names.append(name)
            current = parent()
        return ".".join(reversed(names))


def _key(cls: type, arguments: Arguments) -> Hashable | None:
    """Return what two calls of a constructor that make the same tables have in common."""
    values = (*arguments.args, *arguments.kwargs.values())
    if any(isinstance(value, nn.Module) for value in values):
        return None
    try:
        return (cls, tuple(arguments.kwargs), tuple(_identity(value) for value in values))
    except Exception:  # a repr of somebody's own
        return None


def _identity(value: Any) -> Hashable:
    if isinstance(value, int | float | str | bytes | type(None)):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    # The same config can be changed between two models that are built from it.
    return id(value), repr(getattr(value, "__dict__", value))


def _watch_of_this_thread() -> ConstructionWatch | None:
    """The innermost guard that this thread opened; where it opened none, the last one opened anywhere."""
    if len(_watches) == 1:
        return _watches[0]
    thread = threading.get_ident()
    own = [watch for watch in _watches if watch._thread == thread]
    return (own or _watches or [None])[-1]  # type: ignore[list-item]


def _wrap_init() -> None:
    # DeepSpeed keeps the constructor that it replaced in _old_init and puts that back when zero.Init ends.
    for name in ("__init__", "_old_init"):
        inner = nn.Module.__dict__.get(name)
        if inner is not None and not any(inner is ours for _, _, ours in _wrapped):
            ours = _noting(inner)
            _wrapped.append((name, inner, ours))
            setattr(nn.Module, name, ours)


def _is_torchs(module: nn.Module) -> bool:
    """Say whether a module is one of torch's own: most modules are, and none of them holds positions."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _noting(inner: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inner)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        if _is_torchs(self):
            return
        watch = None if rebuilding() else _watch_of_this_thread()
        if watch is not None:
            try:
                watch._constructions.note(self, sys._getframe(1))
            except Exception:  # whatever a constructor's frames look like, the module must be built
                logger.debug("cannot tell what %s is built with", type(self).__name__, exc_info=True)

    return init


def _unwrap_init() -> None:
    # A wrapper that somebody put around ours stays; ours then finds no watch and passes everything through.
    while _wrapped:
        _, inner, ours = _wrapped.pop()
        for name in ("__init__", "_old_init"):
            if nn.Module.__dict__.get(name) is ours:
                setattr(nn.Module, name, inner)
