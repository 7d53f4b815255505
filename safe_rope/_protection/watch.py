"""Watch modules being built while a guard is open, and protect each as soon as it is complete.

Two hooks. `torch.nn.Module.__init__` tells what every module is built with, so that its constructor can be
run again with nothing intercepted, whatever its class is and wherever that was defined. PyTorch's hook for
registered submodules tells when a module is complete, and its path. A module that has no parent is looked at
when something is called, cast or moved, or when the guard closes.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.jit import ScriptModule

from safe_rope import constructors
from safe_rope._base.by_identity import ByIdentity
from safe_rope._base.registrations import on_buffer, on_module
from safe_rope._base.torch_private import between_compilations
from safe_rope._base.uninterrupted import uninterrupted
from safe_rope._protection.adopted import judge_adopted
from safe_rope._protection.frozen import frozen_positions, unseen_positions
from safe_rope._protection.owners import Building, Owners, is_on_cpu
from safe_rope._protection.plan import Options, Protection, Unprotectable, concerns, prepare
from safe_rope._protection.report import ProtectionReport
from safe_rope._protection.reruns import Reruns, key_of
from safe_rope._protection.rewrite import ProtectedModule, is_pinned, settle, state_of
from safe_rope._protection.rotary import RotaryState
from safe_rope._protection.wrapped_methods import (
    is_torchs,
    unwrap_call,
    unwrap_methods,
    watch_of_this_thread,
    watches,
    watches_lock,
    wrap_call,
    wrap_methods,
)
from safe_rope._recognition.arguments import (
    Arguments,
    arguments_in,
    first_argument,
    has_no_constructor,
    infer_arguments,
    running,
)
from safe_rope._recognition.conditions import Conditions
from safe_rope._recognition.explained import UNMADE, UNTOLD, is_same
from safe_rope._recognition.holdings import entries, get_table, set_table
from safe_rope._recognition.integers import may_be_moved
from safe_rope._recognition.rebuild import rebuilding
from safe_rope._recognition.reference import Reference, stock_class
from safe_rope._recognition.tables import may_hold_positions
from safe_rope._recognition.walk import within
from safe_rope.constructors import _shadow
from safe_rope.errors import UnsupportedModelError

Built = Callable[[nn.Module], None]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_COMPILATION = 60.0
"""Seconds that a guard waits for another thread's compiler, which has read what the guard replaces."""


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
        self._building = ByIdentity[nn.Module, Building]()
        # How each that was looked at was built: it may have put something into another one.
        self._owners = ByIdentity[nn.Module, Building]()
        # What held nothing when it was looked at; its parent may have filled it since.
        self._nothing_yet = ByIdentity[nn.Module, Building]()
        self._looked_at = ByIdentity[nn.Module, None]()
        self._reruns = Reruns()
        self._states: dict[Hashable, _Known] = {}
        self._seen = ByIdentity[nn.Module, None]()
        self._refused = ByIdentity[nn.Module, str]()
        # What parents may still set, of what was built where that is lowered; how it was built.
        self._settable = ByIdentity[nn.Module, Building]()
        self._asked = ByIdentity[nn.Module, None]()
        self._parents = ByIdentity[nn.Module, tuple[weakref.ref[nn.Module], str]]()
        self._above = Owners(self._parents, self._owners, self._nothing_yet, self._building, self._reruns)
        # As they were when they were last told: what outlives its model keeps its name.
        self._paths = ByIdentity[nn.Module, str]()
        self._stop_hearing: list[Callable[[], None]] = []
        # When the constructor of each module had got to that of nn.Module.
        self._numbers = ByIdentity[nn.Module, int]()
        self._begun = itertools.count(1)
        self._is_new = False  # something was built since what was empty has been looked at
        self.has_seen_a_module = False

    def open(self) -> None:
        """Start watching."""
        with between_compilations(_COMPILATION), watches_lock:
            self._stop_hearing = [on_module(self._on_registration), on_buffer(self._on_buffer)]
            watches.append(self)
            constructors.before_exit.append(self._before_exit)
            if len(watches) == 1:
                wrap_methods()

    def close(self) -> None:
        """Protect what never got a parent, put every table back, and stop watching."""
        try:
            self.catch_up()
            self._look_again()
            settle(self._seen)
            self._judge_adopted(set(running("__init__", sys._getframe(1))), threads=True)
            for module in self._seen:
                state_of(module).replays = None
        finally:
            with between_compilations(_COMPILATION), watches_lock:
                for stop in self._stop_hearing:
                    stop()
                watches.remove(self)
                constructors.before_exit.remove(self._before_exit)
                if not watches:
                    unwrap_methods()
            looked_at = [module for module in self._nothing_yet if module not in self._parents]
            self._looked_at.clear()
            for module in looked_at:
                self._looked_at[module] = None
            self._nothing_yet.clear()
            self._owners.clear()
            self._building.clear()
            self._settable.clear()
            self._reruns.clear()
            self._states.clear()

    def catch_up(self) -> None:
        """Protect what was built and never got a parent."""
        for module in self._building:
            self._consider(module)

    @uninterrupted()
    def before_use(self, used: nn.Module | None = None, *, is_read: bool = False) -> None:
        """Protect what this thread has built, before something is called, cast or moved: the last moment.

        Args:
            used: what is cast, moved or loaded, with all that is in it; None where it is not known, in a
                call. A loader may use each module by itself: nothing else is looked at then.
            is_read: its state is read, which nothing that is still empty is used for.

        """
        me = threading.get_ident()
        waiting = [
            module
            for module in self._building
            if (building := self._building.get(module)) is not None and building.thread == me
        ]
        if used is None and not waiting and not self._is_new:
            return  # calls are many, and what another thread builds may wait for long
        unfinished = set(running("__init__", sys._getframe(1)))
        for module in waiting:
            if module not in unfinished:
                self._consider(module)
        among = None if used is None else within(used)
        seen = [module for module in self._seen if among is None or id(module) in among]
        settle(module for module in seen if not isinstance(module, ProtectedModule))
        if is_read:
            self._judge_adopted(unfinished)
            return
        if used is None:
            self._is_new &= bool(unfinished)
        # An engine that takes a finished model is under construction, and fills nothing in it.
        first = min((self._numbers.get(module, 0) for module in unfinished), default=None)
        self._look_at_what_was_empty(among, until=first)
        for module in self._refused:
            if among is not None and id(module) not in among:
                continue
            is_asked = module in self._asked or module not in self._refused
            if not is_asked and self._above.nearest(module) is not None:
                self._asked[module] = None
                self._consider(module, self._owners.get(module), looked=True)
        self._judge_adopted(unfinished)
        with watches_lock:
            if not any(watch._building for watch in watches):
                unwrap_call()

    def _before_exit(self) -> None:
        # What zero.Init would have made of a tensor is known as long as its constructors stand.
        if watch_of_this_thread() is self:
            self.catch_up()
            settle(self._seen)
            self._judge_adopted(set(running("__init__", sys._getframe(1))))
            for owner in {*self._owners, *self._parents}:
                for module in owner.children():
                    if type(module) is nn.Module:  # it may have got its buffers since it was registered
                        _give_stock_dtypes(module)

    def note(self, module: nn.Module, frame: Any) -> None:
        """Remember how ``module`` is being built, from the frame that called its base's constructor."""
        number = self._numbers[module] = next(self._begun)
        thread = threading.get_ident()
        arguments = arguments_in(module, frame)
        if arguments is None and has_no_constructor(type(module)):
            arguments = Arguments((), {})
        building = Building(arguments, Conditions.now(type(module)), thread=thread, number=number)
        self._building[module] = building
        self._is_new = True
        wrap_call()
        if building.conditions is not None and arguments is not None:
            self._reruns.note(module, frame, arguments, building.conditions)

    def note_copy(self, module: nn.Module) -> None:
        """Remember that ``module`` is a copy, which no constructor has built."""
        for name, child in module._modules.items():  # registered in the original alone
            if child is not None and child not in self._parents:
                self._parents[child] = weakref.ref(module), name
        if is_torchs(module):
            return
        if not isinstance(module, ProtectedModule) or _is_pinned_to_nothing(module):
            self._nothing_yet[module] = Building()
        building = Building(conditions=Conditions.now(stock_class(module)), thread=threading.get_ident())
        if isinstance(module, ProtectedModule):
            self._seen[module] = None
            if building.counts_low:
                self._settable[module] = building

    def _look_again(self) -> None:
        """Consider what has been filled since, by a parent or by a loader."""
        for module in self._refused:
            if concerns(module) and not any(_is_meta(value) for _, value in entries(module)):
                self._consider(module, Building(is_filled=True))
        self._look_at_what_was_empty(loaded=True)

    def _look_at_what_was_empty(
        self, among: dict[int, nn.Module] | None = None, *, loaded: bool = False, until: int | None = None
    ) -> None:
        """Consider what has been filled since it was built, of what was begun before the module ``until``."""
        for module in self._nothing_yet if among is None else among.values():
            building = self._nothing_yet.get(module)
            if building is None:
                continue
            if not loaded and building.thread != threading.get_ident():
                continue  # another thread may be filling it
            if until is not None and building.number >= until:
                continue  # so may a parent whose constructor runs
            if _is_pinned_to_nothing(module) and may_hold_positions(module):
                if not (loaded or building.on_real_device):
                    continue  # what stands there may be what nobody has written yet
                # What was not filled then has been filled since, from where nobody knows.
                own = building._replace(is_used=False)  # its forward has run in FP32
                before = state_of(module).notes
                self._consider(module, Building(is_filled=True) if before else own, looked=True)
                if _is_pinned_to_nothing(module) and not state_of(module).notes:
                    state_of(module).notes.update(dict.fromkeys(before, UNTOLD))
            elif concerns(module):
                self._consider(module, building)
            if not loaded:
                used = building if building.is_used else building._replace(is_used=True)
                if self._nothing_yet.get(module, used) is not used:
                    self._nothing_yet[module] = used

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if (
            torch.compiler.is_dynamo_compiling()
            or child is None
            or rebuilding()
            or not self._concerns_this_thread()
        ):
            return
        torchs = is_torchs(child)
        if torchs:
            _give_stock_dtypes(child)
        if torchs and not child._modules and not isinstance(child, _CONTAINERS):
            return  # a leaf such as Linear is on no path that is asked for
        self._parents[child] = (weakref.ref(parent), name)
        if torchs:
            return
        if isinstance(child, ProtectedModule):
            self._see(child)
        elif watch_of_this_thread() is self:
            self._consider(child)

    def _on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """Protect what is complete before another tensor takes the place of a table on meta.

        Nobody could tell the other one from the constructor's, which has no values either.
        """
        held = module._buffers  # what TorchScript has in its place knows no ``get``
        current = held[name] if name in held else None  # noqa: SIM401
        if current is None or not current.is_meta or current is buffer or rebuilding():
            return
        building = self._building.get(module)
        if building is None or building.thread != threading.get_ident():
            return
        if not _is_under_construction(module, sys._getframe(1)):
            self._consider(module)

    def _consider(self, module: nn.Module, building: Building | None = None, *, looked: bool = False) -> None:
        building = building or self._building.pop(module, None) or self._nothing_yet.get(module) or Building()
        self._owners.setdefault(module, building)
        if looked or concerns(module) or (building.counts_low and may_be_moved(module)):
            self._protect(module, building)
        else:
            self._nothing_yet[module] = building
        _give_stock_dtypes(module)

    @uninterrupted()
    def _protect(self, module: nn.Module, building: Building) -> None:
        try:
            result = self._prepare(module, building)
            if isinstance(result, Protection):
                result.carry_out()
                self._see(module)  # by now another thread may close what this watches
                if building.counts_low:
                    self._settable[module] = building
                if _is_pinned_to_nothing(module):
                    self._nothing_yet[module] = building
        except UnsupportedModelError as error:
            self._seen.pop(module, None)
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

    def _see(self, module: nn.Module) -> None:
        self._seen[module] = None
        if self._built is not None:
            self._built(module)

    def _prepare(self, module: nn.Module, building: Building) -> Protection | Unprotectable | None:
        parent = self._parents[module][0]() if module in self._parents else None
        around = () if parent is None else (type(parent).__module__,)
        arguments = building.arguments
        if arguments is None and not building.is_filled:
            arguments = infer_arguments(module, stock_class(module))
        key = None if arguments is None else key_of(type(module), arguments, building.conditions)
        seen = building.arguments is not None and key is not None
        # transformers < 4.48 builds one rotary module per layer: plan the first, reuse its plan for the rest.
        known = self._states.get((key, around)) if seen else None
        if known is not None and _is_built_alike(module, known.built):
            state = known.state.of_another(module)
            return Protection(module, state, reference=known.reference)
        again = None if arguments is None else self._reruns.of(module, arguments, building.conditions, key)
        if again is not None and not again.made(module):
            again = None
        plain = building.conditions is not None and building.conditions.plain and is_on_cpu(module)
        plain &= not building.is_used
        early = not building.is_filled and module not in self._nothing_yet
        above = None if parent is None or is_torchs(parent) else stock_class(parent)
        reference = Reference(again, plain=plain, early=early, above=above)
        result = prepare(module, reference, around, self._options)
        if _tells_nothing(result) and (owned := self._above.reference(module)) is not None:
            by_owner = prepare(module, owned, around, self._options)
            if not (by_owner is None or (isinstance(result, Protection) and _tells_nothing(by_owner))):
                result = by_owner
        moves = again is not None and again.moves
        if isinstance(result, Protection) and result.state and seen and not (result.notes or moves):
            built = {name: value for name, value in entries(module) if isinstance(value, torch.Tensor)}
            self._states[key, around] = _Known(copy.deepcopy(result.state), built, reference)
        return result

    def _judge_adopted(self, unfinished: Container[nn.Module], *, threads: bool = False) -> None:
        """Look at what parents have set in modules since those were protected; not while they still may."""
        for module in self._settable:
            building = self._settable.get(module)
            is_ours = building is not None and (threads or building.thread == threading.get_ident())
            if not is_ours or any(owner in unfinished for owner, _ in self._above.above(module)):
                continue
            self._settable.pop(module, None)
            if isinstance(module, ProtectedModule):
                state_of(module).restore(module)
                own = functools.partial(self._above.rerun, module, building)
                judge_adopted(module, own, self._above.references(module))

    def has_seen_a_model(self) -> bool:
        """Whether a module was built that does more than to hold an unprotected one from before the guard."""
        built = list(self._numbers)
        return self.has_seen_a_module and not (built and all(map(self._only_wraps, built)))

    def _only_wraps(self, module: nn.Module) -> bool:
        parts = within(module).values()
        return not any(isinstance(part, ProtectedModule) for part in parts) and any(
            part not in self._numbers and concerns(part) for part in parts
        )

    def _concerns_this_thread(self) -> bool:
        return self._thread == threading.get_ident() or watch_of_this_thread() is self

    def complete(self, report: ProtectionReport) -> None:
        """Add every position module that was built and still exists to ``report``, ordered by path."""
        entries = sorted(((self._path(module), module) for module in self._seen), key=lambda entry: entry[0])
        known = {*self._parents, *self._nothing_yet, *self._looked_at, *self._seen, *self._refused}
        compiled = Counter(_compiled_in(known))
        for path, module in entries:
            if not self._is_compiled(module, compiled):
                report.add(path, module)
        for module, reason in self._refused.items():
            report.add_unprotected(self._path(module), module, reason)
        for found in (*frozen_positions(known), *unseen_positions(known)):
            report.add_frozen(self._path(found.module), found)

    def _is_compiled(self, module: nn.Module, compiled: Counter[str]) -> bool:
        """Whether what torch.jit.script has made of a module stands in its place, and runs."""
        if module in self._parents:
            parent, name = self._parents[module]
            owner = parent()
            return owner is not None and isinstance(owner._modules.get(name), ScriptModule)
        name = stock_class(module).__name__
        compiled[name] -= 1
        return compiled[name] >= 0

    def _path(self, module: nn.Module) -> str:
        names: list[str] = []
        current: nn.Module | None = module
        while current is not None and current in self._parents:
            parent, name = self._parents[current]
            names.append(name)
            current = parent()
        if current is None:  # a parent is gone
            return self._paths.get(module, ".".join(reversed(names)))
        self._paths[module] = ".".join(reversed(names))
        return self._paths[module]


def _compiled_in(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yield the class of each module that torch.jit.script has compiled and put into one of ``modules``."""
    for module in modules:
        for child in module._modules.values():
            if isinstance(child, ScriptModule):
                yield from (str(getattr(part, "original_name", "")) for part in child.modules())


def _is_under_construction(module: nn.Module, frame: Any) -> bool:
    """Whether a module's constructor runs in ``frame`` or its callers, or its metaclass, which calls that."""
    owners = {"__init__": module, "__call__": type(module)}
    while frame is not None:
        owner = owners.get(frame.f_code.co_name)
        if owner is not None and first_argument(frame) is owner:
            return True
        frame = frame.f_back
    return False


def _is_built_alike(module: nn.Module, built: dict[str, torch.Tensor]) -> bool:
    for name, table in built.items():
        current = get_table(module, name)
        if not isinstance(current, torch.Tensor) or current.is_meta != table.is_meta:
            return False
        if not table.is_meta and not is_same(current, table):
            return False
    return True


def _tells_nothing(result: Protection | Unprotectable | None) -> bool:
    """Whether a module's own constructor gives no table, or none of those that something has filled."""
    if not isinstance(result, Protection):
        return True
    return result.state is None and not result.pins and UNMADE in result.notes.values()


def _is_pinned_to_nothing(module: nn.Module) -> bool:
    return is_pinned(module) and not state_of(module).pins


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


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
