"""Watch modules being built while a guard is open: position modules are built in peace, then protected.

Two hooks. The constructor of every class that a patch names is wrapped, so that it runs with nothing
intercepted; a class that does not exist yet is wrapped when its Python module is imported. And PyTorch's own
hook for registered submodules sees every module that gets a parent, which catches what the first cannot
(DeepSpeed puts constructors back when zero.Init ends) and tells the path of a module that no patch covers.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from safe_rope import constructors
from safe_rope._report import ProtectionReport
from safe_rope.recognition import is_position_module
from safe_rope.registry import RopePatch, find, supported
from safe_rope.rewrite import is_protected

Protect = Callable[[nn.Module, RopePatch, bool], None]
Built = Callable[[nn.Module], None]

_building = threading.local()
_watches: list[ConstructionWatch] = []
_watches_lock = threading.RLock()
_hooked: set[str] = set()


class ConstructionWatch:
    """One guard's view of what is built while it is open."""

    def __init__(self, protect: Protect, built: Built | None = None) -> None:
        self._protect = protect
        self._built = built
        self._thread = threading.get_ident()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parents: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        self._handle: Any = None

    def open(self) -> None:
        """Start watching."""
        with _watches_lock:
            self._handle = register_module_module_registration_hook(self._on_registration)
            _watches.append(self)
            for patch in supported():
                for name in patch.modules:
                    _wrap_when_imported(name)

    def close(self) -> None:
        """Stop watching; with the last watch, put back every constructor that was wrapped."""
        with _watches_lock:
            self._handle.remove()
            _watches.remove(self)
            if not _watches:
                _unwrap_constructors()

    def adopt(self, module: nn.Module, patch: RopePatch, *, constructed: bool) -> None:
        """Protect a position module that is complete."""
        self._see(module)
        self._protect(module, patch, constructed)

    def _see(self, module: nn.Module) -> None:
        self._seen.add(module)
        if self._built is not None:
            self._built(module)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or not self._concerns_this_thread():
            return
        self._parents[child] = (weakref.ref(parent), name)
        patch = find(child)
        if patch is not None:
            if is_protected(child):
                self._see(child)
            elif _watch_of_this_thread() is self:
                self.adopt(child, patch, constructed=False)
        elif is_position_module(child):
            self._see(child)

    def _concerns_this_thread(self) -> bool:
        return self._thread == threading.get_ident() or _watch_of_this_thread() is self

    def complete(self, report: ProtectionReport) -> None:
        """Add every position module that was built and still exists to ``report``, ordered by path."""
        entries = sorted(((self._path(module), module) for module in self._seen), key=lambda entry: entry[0])
        for path, module in entries:
            patch = find(module)
            if patch is not None:
                report.add_protected(path, module, patch.family)
            else:
                report.add_unprotected(path, module)

    def _path(self, module: nn.Module) -> str:
        names: list[str] = []
        current: nn.Module | None = module
        while current is not None and current in self._parents:
            parent, name = self._parents[current]
            names.append(name)
            current = parent()
        return ".".join(reversed(names))


def _watch_of_this_thread() -> ConstructionWatch | None:
    """The innermost guard that this thread opened; where it opened none, the last one opened anywhere."""
    thread = threading.get_ident()
    own = [watch for watch in _watches if watch._thread == thread]
    return (own or _watches or [None])[-1]  # type: ignore[list-item]


def _wrap_when_imported(name: str) -> None:
    if name in sys.modules:
        _wrap_constructors(sys.modules[name])
    elif name not in _hooked:
        # wrapt keeps a hook until the import happens; it does nothing when no guard is open by then.
        _hooked.add(name)
        wrapt.register_post_import_hook(_on_import, name)


def _on_import(module: ModuleType) -> None:
    with _watches_lock:
        _hooked.discard(module.__name__)
        if _watches:
            _wrap_constructors(module)


_wrapped: list[tuple[type, Any, Any]] = []


def _wrap_constructors(module: ModuleType) -> None:
    for value in list(vars(module).values()):
        if not (isinstance(value, type) and issubclass(value, nn.Module)):
            continue
        patch = find(value)
        if patch is not None and patch.covers(value):
            # DeepSpeed keeps the constructor that it replaced in _old_init and puts that back when zero.Init
            # ends.
            for name in ("__init__", "_old_init"):
                stock = value.__dict__.get(name)
                if stock is not None and not hasattr(stock, "_safe_rope_stock"):
                    wrapper = _building_in_peace(stock)
                    _wrapped.append((value, stock, wrapper))
                    setattr(value, name, wrapper)


def _unwrap_constructors() -> None:
    while _wrapped:
        cls, stock, wrapper = _wrapped.pop()
        for attribute in ("__init__", "_old_init"):
            if cls.__dict__.get(attribute) is wrapper:
                setattr(cls, attribute, stock)


def _building_in_peace(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def constructor(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        inside = getattr(_building, "modules", ())
        watch = _watch_of_this_thread()
        if watch is None or any(module is self for module in inside):
            return stock(self, *args, **kwargs)
        _building.modules = (*inside, self)
        try:
            with constructors.pristine():
                stock(
                    self,
                    *map(_without_device, args),
                    **kwargs | ({"device": None} if "device" in kwargs else {}),
                )
        finally:
            _building.modules = inside
        patch = find(self)
        if patch is not None:
            watch.adopt(self, patch, constructed=True)
            asked = [kwargs.get("device"), *(value for value in args if isinstance(value, torch.device))]
            _send_where_it_belongs(self, next((device for device in asked if device is not None), None))

    constructor._safe_rope_stock = stock  # type: ignore[attr-defined]
    return constructor


def _without_device(value: Any) -> Any:
    # Tables are computed on CPU whatever device the constructor is asked for, and moved there afterwards.
    return None if isinstance(value, torch.device) else value


def _send_where_it_belongs(module: nn.Module, asked: Any) -> None:
    # Where nothing is asked, a constructor as it stands outside tells: zero.Init and torch.device contexts
    # choose.
    device = torch.device(asked) if asked is not None else torch.empty(0).device
    if device.type not in ("cpu", "meta"):
        module.to(device)
