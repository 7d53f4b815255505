"""Watch modules being built while a guard is open, and protect each as soon as it is complete.

Two hooks. `torch.nn.Module.__init__` tells what every module is built with, so that its constructor can be
run again with nothing intercepted, whatever its class is and wherever that was defined. PyTorch's hook for
registered submodules tells when a module is complete, and its path. A module that has no parent is looked at
when something is called, cast or moved, or when the guard closes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope import constructors
from safe_rope._base import bytecode
from safe_rope._base.positions import is_watched
from safe_rope._base.registrations import on_module
from safe_rope._base.replaced import Replaced
from safe_rope._protection.frozen import frozen_positions, unseen_positions
from safe_rope._protection.plan import (
    Options,
    Protection,
    Unprotectable,
    concerns,
    prepare,
)
from safe_rope._protection.report import ProtectionReport
from safe_rope._protection.rewrite import ProtectedModule, is_pinned, settle, state_of
from safe_rope._protection.rotary import RotaryState
from safe_rope._recognition.arguments import Arguments, arguments_in, first_argument, infer_arguments
from safe_rope._recognition.conditions import Conditions
from safe_rope._recognition.explained import is_same
from safe_rope._recognition.holdings import entries, get_table, set_table
from safe_rope._recognition.rebuild import rebuilding
from safe_rope._recognition.reference import Again, Reference, stock_class
from safe_rope._recognition.tables import may_hold_positions
from safe_rope.constructors import _shadow
from safe_rope.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

Built = Callable[[nn.Module], None]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_watches: list[ConstructionWatch] = []
_watches_lock = threading.RLock()
_wrapped: list[tuple[type, str, Any, Any]] = []  # a class and a name in it, what was there, ours


class _Building(NamedTuple):
    """How a module was built: with which arguments and under which conditions, where that is known."""

    arguments: Arguments | None = None
    conditions: Conditions | None = None
    is_filled: bool = False
    """Whether somebody has filled it since, from where nobody knows."""
    thread: int | None = None

    @property
    def on_real_device(self) -> bool:
        """Whether its tensors were made with values."""
        return self.conditions is not None and self.conditions.device != "meta"


class _Known(NamedTuple):
    """What became of the first of several modules with the same arguments, and what it was built with."""

    state: RotaryState
    built: dict[str, torch.Tensor]
    reference: Reference


class ConstructionWatch:
    """One guard's view of what is built while it is open."""

    def __init__(self, options: Options, built: Built | None = None) -> None:
        self._options = options
        self._built = built
        self._thread = threading.get_ident()
        self._building: weakref.WeakKeyDictionary[nn.Module, _Building] = weakref.WeakKeyDictionary()
        # What held nothing when it was looked at; its parent may have filled it since.
        self._nothing_yet: weakref.WeakKeyDictionary[nn.Module, _Building] = weakref.WeakKeyDictionary()
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._again: dict[Hashable, tuple[Arguments, Again]] = {}
        self._states: dict[Hashable, _Known] = {}
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._refused: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._parents: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        self._stop_hearing: Callable[[], None] = lambda: None
        self._is_new = False  # something was built since what was empty has been looked at
        self.has_seen_a_module = False

    def open(self) -> None:
        """Start watching."""
        with _watches_lock:
            self._stop_hearing = on_module(self._on_registration)
            _watches.append(self)
            constructors.before_exit.append(self._before_exit)
            if len(_watches) == 1:
                _wrap_init()

    def close(self) -> None:
        """Protect what never got a parent, put every table back, and stop watching."""
        try:
            self.catch_up()
            self._look_again()
            settle(self._seen)
            for module in self._seen:
                state_of(module).replays = None
        finally:
            with _watches_lock:
                self._stop_hearing()
                _watches.remove(self)
                constructors.before_exit.remove(self._before_exit)
                if not _watches:
                    _unwrap_init()
            self._looked_at = weakref.WeakSet([*self._parents, *self._nothing_yet])
            self._nothing_yet.clear()
            self._building.clear()
            self._again.clear()
            self._states.clear()

    def catch_up(self) -> None:
        """Protect what was built and never got a parent."""
        for module in list(self._building):
            self._consider(module)

    def before_use(self, *, by_call: bool = False) -> None:
        """Protect what this thread has built, before something is called, cast or moved: the last moment."""
        me = threading.get_ident()
        waiting = [module for module, building in list(self._building.items()) if building.thread == me]
        if by_call and not waiting and not self._is_new:
            return  # calls are many, and what another thread builds may wait for long
        unfinished = set(_under_construction(sys._getframe(1)))
        for module in waiting:
            if module not in unfinished:
                self._consider(module)
        settle(module for module in self._seen if not isinstance(module, ProtectedModule))
        if not unfinished:
            self._is_new = False
            self._look_at_what_was_empty()
        with _watches_lock:
            if not any(watch._building for watch in _watches):
                _call.put_back()

    def _before_exit(self) -> None:
        # What zero.Init would have made of a tensor is known as long as its constructors stand.
        if _watch_of_this_thread() is self:
            self.catch_up()
            settle(self._seen)

    def note(self, module: nn.Module, frame: Any) -> None:
        """Remember how ``module`` is being built, from the frame that called its base's constructor."""
        building = _Building(arguments_in(module, frame), Conditions.now(), thread=threading.get_ident())
        self._building[module] = building
        self._is_new = True
        _wrap_call()
        conditions, arguments = building.conditions, building.arguments
        if conditions is None or conditions.device != "meta" or arguments is None:
            return
        # What has no parent is looked at last, when a setting that its constructor reads may be another.
        has_a_parent = any(owner is not module for owner in _under_construction(frame))
        if not has_a_parent and bytecode.facts(type(module)).makes_waves:
            self._run_again(module, arguments, conditions, _key(type(module), arguments, conditions))

    def _look_again(self) -> None:
        """Consider what has been filled since, by a parent or by a loader."""
        for module in list(self._refused):
            if concerns(module) and not any(_is_meta(value) for _, value in entries(module)):
                self._consider(module, _Building(is_filled=True))
        self._look_at_what_was_empty(loaded=True)

    def _look_at_what_was_empty(self, loaded: bool = False) -> None:
        for module, building in list(self._nothing_yet.items()):
            if not loaded and building.thread != threading.get_ident():
                continue  # another thread may be filling it
            if _is_pinned_to_nothing(module) and may_hold_positions(module):
                if not (loaded or building.on_real_device):
                    continue  # what stands there may be what nobody has written yet
                # What was not filled then has been filled since, from where nobody knows.
                unknown = _Building(is_filled=True) if state_of(module).notes else building
                self._consider(module, unknown, looked=True)
            elif concerns(module):
                self._consider(module, building)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or rebuilding() or not self._concerns_this_thread():
            return
        torchs = _is_torchs(child)
        if torchs:
            _give_stock_dtypes(child)
        if torchs and not child._modules and not isinstance(child, _CONTAINERS):
            return  # a leaf such as Linear is on no path that is asked for
        self._parents[child] = (weakref.ref(parent), name)
        if torchs:
            return
        if isinstance(child, ProtectedModule):
            self._see(child)
        elif _watch_of_this_thread() is self:
            self._consider(child)

    def _consider(
        self, module: nn.Module, building: _Building | None = None, *, looked: bool = False
    ) -> None:
        building = building or self._building.pop(module, None) or _Building()
        if not (looked or concerns(module)):
            self._nothing_yet[module] = building
            _give_stock_dtypes(module)
            return
        try:
            result = self._prepare(module, building)
            if isinstance(result, Protection):
                self._see(module)
                result.carry_out()
                if _is_pinned_to_nothing(module):
                    self._nothing_yet[module] = building
        except UnsupportedModelError as error:
            self._seen.discard(module)
            result = Unprotectable(module, str(error))
        refused = self._refused.pop(module, None)
        if result is None and refused is not None:
            result = Unprotectable(module, refused)  # nothing new is known
        if result is None:
            self._nothing_yet[module] = building
        if isinstance(result, Unprotectable):
            if self._built is not None:
                self._built(module)
            self._refused[module] = result.reason
        _give_stock_dtypes(module)

    def _see(self, module: nn.Module) -> None:
        self._seen.add(module)
        if self._built is not None:
            self._built(module)

    def _prepare(self, module: nn.Module, building: _Building) -> Protection | Unprotectable | None:
        parent = self._parents[module][0]() if module in self._parents else None
        around = () if parent is None else (type(parent).__module__,)
        arguments = building.arguments
        if arguments is None and not building.is_filled:
            arguments = infer_arguments(module, stock_class(module))
        key = None if arguments is None else _key(type(module), arguments, building.conditions)
        seen = building.arguments is not None and key is not None
        # transformers < 4.48 builds one rotary module per layer: plan the first, reuse its plan for the rest.
        known = self._states.get((key, around)) if seen else None
        if known is not None and _is_built_alike(module, known.built):
            state = known.state.of_another(module)
            return Protection(module, state, reference=known.reference)
        again = None if arguments is None else self._run_again(module, arguments, building.conditions, key)
        plain = building.conditions is not None and building.conditions.plain and _is_on_cpu(module)
        early = not building.is_filled and module not in self._nothing_yet
        reference = Reference(again, plain=plain, early=early)
        result = prepare(module, reference, around, self._options)
        if isinstance(result, Protection) and result.state and seen and not result.notes:
            built = {name: value for name, value in entries(module) if isinstance(value, torch.Tensor)}
            self._states[key, around] = _Known(copy.deepcopy(result.state), built, reference)
        return result

    def _run_again(
        self, module: nn.Module, arguments: Arguments, conditions: Conditions | None, key: Hashable | None
    ) -> Again:
        known = self._again.get(key) if key is not None else None
        if known is None:
            possible = Conditions.usual() if conditions is None else conditions.variants()
            known = (arguments, Again(type(module), arguments, possible))
            if key is not None:
                self._again[key] = known  # the arguments stay alive with it, so that ids stay theirs
        return known[1]

    def _concerns_this_thread(self) -> bool:
        return self._thread == threading.get_ident() or _watch_of_this_thread() is self

    def complete(self, report: ProtectionReport) -> None:
        """Add every position module that was built and still exists to ``report``, ordered by path."""
        entries = sorted(((self._path(module), module) for module in self._seen), key=lambda entry: entry[0])
        for path, module in entries:
            report.add(path, module)
        for module, reason in self._refused.items():
            report.add_unprotected(self._path(module), module, reason)
        known = {*self._parents, *self._nothing_yet, *self._looked_at, *self._seen, *self._refused}
        for found in (*frozen_positions(known), *unseen_positions(known)):
            report.add_frozen(self._path(found.module), found)

    def _path(self, module: nn.Module) -> str:
        names: list[str] = []
        current: nn.Module | None = module
        while current is not None and current in self._parents:
            parent, name = self._parents[current]
            names.append(name)
            current = parent()
        return ".".join(reversed(names))


def _under_construction(frame: Any) -> Iterator[nn.Module]:
    """Yield the modules whose constructors run in ``frame`` and its callers, the innermost first."""
    while frame is not None:
        owner = first_argument(frame) if frame.f_code.co_name == "__init__" else None
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back


def _key(cls: type, arguments: Arguments, conditions: Conditions | None) -> Hashable | None:
    """Return what two calls of a constructor that make the same tables have in common."""
    key = arguments.key()
    return None if key is None else (cls, conditions, key)


def _is_built_alike(module: nn.Module, built: dict[str, torch.Tensor]) -> bool:
    for name, table in built.items():
        current = get_table(module, name)
        if not isinstance(current, torch.Tensor) or current.is_meta != table.is_meta:
            return False
        if not table.is_meta and not is_same(current, table):
            return False
    return True


def _is_pinned_to_nothing(module: nn.Module) -> bool:
    return is_pinned(module) and not state_of(module).pins


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_on_cpu(module: nn.Module) -> bool:
    # Another device computes other bits: what the constructor gives on CPU is what counts.
    tensors = [value for _, value in entries(module) if isinstance(value, torch.Tensor)]
    return all(tensor.device.type in ("cpu", "meta") for tensor in tensors)


def _give_stock_dtypes(module: nn.Module) -> None:
    """Give what is no position table the dtype that it has without a guard.

    The constructors are truthful for the sake of position tables; the model's other parts count on what
    zero.Init makes of every tensor.
    """
    if not _shadow.has_marks():
        return
    kept = set(state_of(module).names(module)) if isinstance(module, ProtectedModule) else set()
    for name, value in list(entries(module)):
        dtype = _shadow.shadow_dtype(value) if isinstance(value, torch.Tensor) and name not in kept else None
        if dtype is not None and not isinstance(value, nn.Parameter):
            set_table(module, name, value.to(dtype))


def _watch_of_this_thread() -> ConstructionWatch | None:
    """The innermost guard that this thread opened; where it opened none, the last one opened anywhere."""
    if len(_watches) == 1:
        return _watches[0]
    thread = threading.get_ident()
    own = [watch for watch in _watches if watch._thread == thread]
    return (own or _watches or [None])[-1]  # type: ignore[list-item]


def _wrap_init() -> None:
    # DeepSpeed keeps the constructor that it replaced in _old_init and puts that back when zero.Init ends.
    wraps: dict[str, Callable[..., Any]] = {"__init__": _noting, "_old_init": _noting}
    for name in ("_apply", "train", "load_state_dict"):
        wraps[name] = functools.partial(_looking_before, name)
    for name, wrap in wraps.items():
        inner = nn.Module.__dict__.get(name)
        if inner is not None and not any(inner is ours for _, _, _, ours in _wrapped):
            _replace(nn.Module, name, inner, wrap(inner))
    if "_old_init_subclass" in vars(nn.Module):
        # A zero.Init that has ended leaves the constructor that a class inherits in the class itself.
        base, ours = inspect.unwrap(nn.Module.__init__), nn.Module.__init__
        # Sigmoid has none of its own: what stands there is somebody's wrapper, in all classes without one.
        left: Any = vars(nn.Sigmoid).get("__init__")
        for cls in _subclasses(nn.Module):
            own = vars(cls).get("__init__")
            if not isinstance(own, types.FunctionType) or _is_deepspeeds(own):
                continue
            if inspect.unwrap(own) is base:
                _replace(cls, "__init__", own, ours)
            elif own is left:
                _replace(cls, "__init__", own, _noting(own))


def _replace(owner: type, name: str, before: Any, ours: Any) -> None:
    _wrapped.append((owner, name, before, ours))
    setattr(owner, name, ours)


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


def _is_deepspeeds(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).startswith("deepspeed.")


def _is_torchs(module: nn.Module) -> bool:
    """Say whether a module is one of torch's own: most modules are, and none of them holds positions."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _noting(inner: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inner)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        for one in _watches:
            one.has_seen_a_module = True
        if _is_torchs(self):
            return
        watch = None if rebuilding() else _watch_of_this_thread()
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
        if rebuilding() or _this_thread.uses:
            return inner(self, *args, **kwargs)
        stock = type(self)
        for watch in tuple(_watches):  # each has seen others being built
            watch.before_use()
        _this_thread.uses = True  # its children are about to get here, each by itself
        try:
            # What has just been protected may have a method of its own.
            return (inner if type(self) is stock else getattr(type(self), name))(self, *args, **kwargs)
        finally:
            _this_thread.uses = False

    return method


_call = Replaced()
"""A call of any module, wrapped only while something that was built has not been considered."""


def _wrap_call() -> None:
    with _watches_lock:
        if _call:
            return
        inner = nn.Module.__call__

        @functools.wraps(inner)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (rebuilding() or is_watched()):
                for watch in tuple(_watches):
                    watch.before_use(by_call=True)
            return inner(self, *args, **kwargs)

        _call.put(nn.Module, "__call__", call)


def _unwrap_init() -> None:
    _call.put_back()
    # A wrapper that somebody put around ours stays; ours then finds no watch and passes everything through.
    while _wrapped:
        owner, name, before, ours = _wrapped.pop()
        # zero.Init moves the constructor that it finds to _old_init, and back.
        for place in ("__init__", "_old_init") if name in ("__init__", "_old_init") else (name,):
            if vars(owner).get(place) is ours:
                setattr(owner, place, before)
