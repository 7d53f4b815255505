"""Keep an architecture's application function FP32-aware for as long as a protected model needs it.

This is the one global replacement that outlives the guard. It is counted: the first protected module of a
patch installs the wrapper, and when the last one is gone the stock function is put back, unless somebody else
has replaced it meanwhile.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from safe_rope.registry import RopePatch
from safe_rope.rotation import fp32_application

# Re-entrant, because a finalizer can run in the middle of an acquisition in the same thread.
_lock = threading.RLock()
_users: dict[str, int] = {}
_installed: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}


def acquire(user: object, patch: RopePatch) -> None:
    """Keep the application functions of ``patch`` FP32-aware until ``user`` is garbage-collected."""
    with _lock:
        _users[patch.family] = _users.get(patch.family, 0) + 1
        for module_name in patch.modules:
            _install(module_name, patch.applications)
        weakref.finalize(user, _release, patch).atexit = False


def _install(module_name: str, applications: tuple[str, ...]) -> None:
    for name in applications:
        owner, attribute = _place(module_name, name)
        current = getattr(owner, attribute, None)
        known = _installed.get((module_name, name))
        # Whatever stands there now is the function to wrap: a kernel library may have replaced the stock one.
        if current is None or (known is not None and known[1] is current):
            continue
        wrapper = fp32_application(current)
        _installed[module_name, name] = (current, wrapper)
        setattr(owner, attribute, wrapper)


def _place(module_name: str, name: str) -> tuple[Any, str]:
    """Return what holds an application function, and under which name; None where it does not exist."""
    owner: Any = sys.modules.get(module_name)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = vars(owner).get(part) if owner is not None else None
    return owner, attribute


class _NextCollection:
    """Garbage from the start: what is tied to it happens when the garbage collector runs again."""

    def __init__(self) -> None:
        self.cycle = self


def _compiler_is_at_work() -> bool:
    # The compile context also spans the making of guards, after the tracing context has closed.
    contexts = (getattr(torch._guards, name, None) for name in ("CompileContext", "TracingContext"))
    return any(context is not None and context.try_get() is not None for context in contexts)


def _release(patch: RopePatch) -> None:
    if _compiler_is_at_work():
        # A compiler that this collection interrupts would find another function than a moment ago.
        weakref.finalize(_NextCollection(), _release, patch).atexit = False
        return
    with _lock:
        _users[patch.family] -= 1
        if _users[patch.family]:
            return
        del _users[patch.family]
        for module_name in patch.modules:
            for name in patch.applications:
                stock, wrapper = _installed.pop((module_name, name), (None, None))
                owner, attribute = _place(module_name, name)
                if owner is not None and wrapper is not None and getattr(owner, attribute, None) is wrapper:
                    setattr(owner, attribute, stock)


def installed(patch: RopePatch) -> bool:
    """Whether every application function of ``patch`` that exists is FP32-aware at this moment."""
    for module_name in patch.modules:
        for name in patch.applications:
            owner, attribute = _place(module_name, name)
            current = getattr(owner, attribute, None)
            if current is not None and _installed.get((module_name, name), (None, None))[1] is not current:
                return False
    return True
