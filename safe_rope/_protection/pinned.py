"""What a pinned module knows: the true values of its tables, and how its forward is run on them.

The module keeps computing as it does. Its tables are put back whenever they have been cast, moved, lost or
damaged, in the precision that its constructor gives them on CPU in FP32. How its forward sees them is the
business of `safe_rope._protection.running`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from safe_rope._base import bytecode, changes, methods
from safe_rope._base.by_identity import ByIdentity
from safe_rope._base.carried import Carried
from safe_rope._base.dtypes import LOW
from safe_rope._base.effects import acts
from safe_rope._base.functions import signature_of
from safe_rope._base.positions import is_watched
from safe_rope._base.tensors import is_captured
from safe_rope._base.text import class_name
from safe_rope._base.torch_private import forget_compiled, is_learned
from safe_rope._protection import running, stand_ins
from safe_rope._protection.handed_out import note_copied
from safe_rope._protection.keeper import Keeper
from safe_rope._protection.shown import is_shown, show
from safe_rope._recognition.applications import Applications, How
from safe_rope._recognition.explained import LOST, MADE_LOW, UNKNOWN, is_cast, is_damage, is_unfilled
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.outside import REMEMBERING
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.tables import only_counts, only_makes_positions
from safe_rope._recognition.waves import are_phasors, oscillates
from safe_rope.constructors._shadow import shadow_dtype
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation._cos_sin import CosSin

_TO_FORWARD = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
"""What an own ``__call__`` that leads to ``forward`` reads."""
_COUNTS_TO = 2.0**24
"""How far FP32 counts."""
_reaches = ByIdentity[torch.Tensor, float]()
"""Those that stand for all, with their reach."""
_values: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = weakref.WeakValueDictionary()


def shared(values: torch.Tensor) -> torch.Tensor:
    """Return the tensor that stands for all pins with these values: layers often have the same table each."""
    if values in _reaches:
        return values
    numbers = values.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(numbers.tobytes()).digest()
    one = _values.setdefault((tuple(values.shape), values.dtype, digest), values)
    if one not in _reaches:
        _reaches[one] = _reach(one)
    return one


@dataclasses.dataclass
class Pin(Carried):
    """One table: its true values, and whether they are ready for use (sin and cos, not frequencies)."""

    values: torch.Tensor
    finished: bool
    reach: float = 0.0
    """The largest of values that are whole numbers throughout; 0 of any other."""


class PinnedState(Keeper):
    """What a pinned module knows; it is kept by the module and copied with it."""

    def __init__(
        self,
        module: nn.Module,
        tables: dict[str, tuple[torch.Tensor, bool]],
        applied: Applications | None = None,
    ) -> None:
        super().__init__()
        self.applied = applied
        self.pins = {name: Pin(one, ready, _reach_of(one)) for name, (one, ready) in tables.items()}
        self.nominal = {name: _nominal(module, name, pin.values) for name, pin in self.pins.items()}
        self.owner = class_name(type(module))
        stock: Any = stock_class(module)
        code = bytecode.conduct(stock)  # Dynamo cannot read bytecode
        self.code = code._replace(computes=code.computes or only_makes_positions(module, stock))
        self.only_counts = only_counts(module, stock)
        if changes.stores_when_called(stock):
            self.awaited = {name for name in self.pins if get_table(module, name) is None}
        self.acts = acts(stock)
        self.runner = stand_ins.Runner()
        self.patch: Callable[..., Any] | None = None  # the forward that somebody has put into its class since
        self.marked: dict[str, CosSin] = {}  # tables that an application function takes
        self.seen = frozenset(name for name, one in module._buffers.items() if one is not None)

    @property
    def how(self) -> How | None:
        """What is applied in FP32: its results, its tables, by its own methods; None for nothing."""
        return None if self.applied is None else self.applied.how

    def differs(self, name: str) -> bool:
        """Whether the stock model has the table in another dtype than the true values."""
        return self.nominal[name] != self.pins[name].values.dtype

    def counts_further(self, name: str) -> bool:
        """Whether a table holds integers, as indices do, that its dtype in the stock model cannot."""
        nominal = self.nominal[name]
        return nominal in LOW and self.pins[name].reach > 2 / torch.finfo(nominal).eps

    def is_scale(self, name: str) -> bool:
        """Whether a finished table may scale phases: a row of numbers beside frequencies."""
        beside = any(not pin.finished for pin in self.pins.values())
        return beside and self.pins[name].finished and self.pins[name].values.dim() < 2

    def may_be_mended(self, stock: Any) -> bool:
        """Whether ``forward`` may make tables anew for their dtype, which nobody can say to be right.

        In FP32 it would find nothing to make.
        """
        kept = {name for name, pin in self.pins.items() if pin.finished and self.notes.get(name) in UNKNOWN}
        return bool(kept and kept & changes.changed_by_forward(stock))

    # ------------------------------------------------------------------ the tables

    def names(self, module: nn.Module) -> Iterable[str]:
        return self.pins

    def make(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        values = self.pins[name].values
        # Code that asks a table of 16 bits for its dtype is to hear what it does in the stock model.
        dtype = self.nominal[name] if values.dtype in LOW else values.dtype
        with torch.inference_mode(False):
            return values.to(device, dtype, copy=True)

    def put(self, module: nn.Module, name: str, table: torch.Tensor) -> None:
        super().put(module, name, table)
        if self.how == "tables" and table.dtype == torch.float32:
            self.marked[name] = CosSin(table, self.nominal[name])

    def adopt(self, module: nn.Module, name: str, values: torch.Tensor) -> None:
        self.adopted |= {name}
        pin = self.pins[name]
        # A copy that nobody else writes to, where the table is: a copy to the CPU would stop a device.
        with torch.inference_mode(False), torch.no_grad():
            pin.values = values.detach().clone()

    def lose(self, module: nn.Module, name: str) -> None:
        del self.pins[name]
        self.notes[name] = LOST

    def drop(self, module: nn.Module, name: str) -> None:
        del self.pins[name]  # its forward makes it anew, or has no use for it
        self.replace_placed(name)

    def keep_made(self, module: nn.Module, name: str, table: torch.Tensor) -> None:
        """Keep a table that the module's own forward has made anew, and where it has put it."""
        if is_learned(table):
            return  # `restore` leaves it where it is
        if table.dtype in LOW and self.pins[name].values.dtype not in LOW:
            by_forward = changes.stores_when_called(stock_class(module)) and not is_watched()
            if by_forward and is_cast(table, self.pins[name].values.to(table.device)):
                return  # a mere cast: `restore` undoes it
            warnings.warn(
                f"{type(module).__name__} has made {name} anew in {table.dtype}, in a forward that cannot be "
                "run again in FP32: until it makes it anew in FP32 it is as rounded as without safe_rope. "
                "Build the model with tables that are long enough, or protect the class by a RopePatch",
                PrecisionWarning,
                stacklevel=2,
            )
            self.nominal[name], self.notes[name] = table.dtype, MADE_LOW
        elif table.dtype not in LOW and self.notes.get(name) == MADE_LOW:
            del self.notes[name]
        self.adopt(module, name, table)
        self.replace_placed(name)
        if not is_watched():  # what a transform wraps is no tensor of a device
            # What is in the place of another table, too, is written to under both names.
            is_shared = any([placed.is_right(table) for placed in self._placed.values()])
            self.put(module, name, table if is_shared else self.make(module, name, table.device))

    def keep_new(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        """Keep what the module's own forward has put into a buffer in FP32: a later cast would round it."""
        if is_learned(buffer):
            return
        # Anything else than sines may be phases, for all that is known, and so may what cannot be read.
        is_finished = not is_captured(buffer) and (oscillates(buffer) or are_phasors(buffer))
        self.pins[name] = Pin(buffer, finished=is_finished)
        self.nominal[name] = buffer.dtype
        self.states |= {name}
        self.adopt(module, name, buffer)
        # No write to an inference tensor is counted.
        self.put(module, name, self.make(module, name, buffer.device) if buffer.is_inference() else buffer)
        show(module, name)
        self.is_shown &= is_shown(module, name)

    def follow_write(self, module: nn.Module, name: str, table: torch.Tensor) -> None:
        """Keep what the module's own forward has written to a table in FP32, as a clock does to its time."""
        if is_learned(table):
            return
        if name not in self.states:
            here, known = table.detach().cpu(), self.pins[name].values.cpu()
            if is_damage(here, known) and not is_unfilled(here, known):
                return  # `restore` undoes what is merely rounded
            self.states |= {name}
        self.adopt(module, name, table)
        self.put(module, name, table)

    def keep_come(self, module: nn.Module) -> None:
        """Keep the buffers that a method, a hook or a parent has put into a mere maker of positions since."""
        if all([name in self.seen or one is None for name, one in module._buffers.items()]):
            return
        if not running.does_more(module):
            for name, (buffer, _) in running.precise_buffers(module).items():
                if name not in self.seen and name not in self.pins and name not in self.caches:
                    self.keep_new(module, name, buffer)
        self.seen |= {name for name, one in module._buffers.items() if one is not None}

    # ------------------------------------------------------------------ forward

    def rotates(self, method: str) -> bool:
        """Whether ``method`` of the module takes q and k and is to return them rotated in FP32."""
        return self.applied is not None and method in self.applied.methods

    def follow_patch(self, forward: Callable[..., Any]) -> None:
        """Forget what is known of the forward of a class that somebody has given another one since."""
        if self.patch is not forward:
            self.patch, self.runner = forward, stand_ins.Runner()
            self.code = self.code._replace(counts=True, computes=True, stores=True, keeps=True, turns=True)

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedState:
        note_copied(memo)
        duplicate = copy.copy(self)
        duplicate.pins = {name: dataclasses.replace(pin) for name, pin in self.pins.items()}
        duplicate.nominal, duplicate.notes = dict(self.nominal), dict(self.notes)
        duplicate.caches, duplicate.before = dict(self.caches), dict(self.before)
        duplicate._placed, duplicate.marked, duplicate.runner = {}, {}, stand_ins.Runner()
        duplicate.attributes, duplicate.awaited = self._attributes_of_copy(), set(self.awaited)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "runner": stand_ins.Runner(), "marked": {}, "patch": None}


def pinned_attribute(stock: type[nn.Module], name: str, *, of_forward: bool) -> Any:
    """Return what makes positions in a pinned ``stock`` under a name besides ``forward``: on the true tables.

    It is a method of some kind or a property, and as in stock where it is asked of the class. ``of_forward``
    says that ``forward`` asks for it, too.
    """
    raw: Any = inspect.getattr_static(stock, name)
    if isinstance(raw, property | functools.cached_property):
        computed: Any = raw.fget if isinstance(raw, property) else raw.func
        made = functools.partial(running.run_beside, called=computed, of_forward=of_forward)
        return raw.getter(made) if isinstance(raw, property) else functools.cached_property(made)

    is_function = isinstance(raw, types.FunctionType | REMEMBERING)

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(raw, staticmethod):
            return raw.__func__(*args, **kwargs)
        if isinstance(raw, classmethod):
            return raw.__func__(type(module), *args, **kwargs)
        if isinstance(raw, functools.partialmethod) and isinstance(raw.func, types.FunctionType):
            return raw.func(module, *raw.args, *args, **{**raw.keywords, **kwargs})
        if not is_function:
            return raw.__get__(module, type(module))(*args, **kwargs)
        now: Any = getattr(stock, name)  # somebody may have replaced it
        return (now.__wrapped__ if isinstance(now, REMEMBERING) else now)(module, *args, **kwargs)

    reads = methods.names_in(raw) if isinstance(raw, types.FunctionType) else frozenset()
    leads_to_forward = name == "__call__" and not reads.isdisjoint(_TO_FORWARD)

    @functools.wraps(getattr(stock, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if leads_to_forward and "forward" in self.__dict__:
            return called(self, *args, **kwargs)  # a copy would share that forward
        return running.run_beside(self, called, args, kwargs, of_forward=of_forward)

    forget_compiled(method)
    return method if is_function else _OfInstances(raw, method)


class _OfInstances:
    """A method that is ``raw`` on the class and ``method`` on a module."""

    def __init__(self, raw: Any, method: Callable[..., Any]) -> None:
        self._raw = raw
        self._method = method

    def __get__(self, module: Any, owner: type) -> Any:
        # Dynamo traces no call of `types.MethodType`.
        return self._raw.__get__(None, owner) if module is None else functools.partial(self._method, module)


def pinned_forward(stock: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a pinned ``stock``: its own, on the true tables."""
    inner: Any = stock.forward
    raw = inspect.getattr_static(stock, "forward")
    if not isinstance(raw, types.FunctionType | REMEMBERING):
        return _bound_anew(raw, inner)
    # What a forward that remembers remembers was computed from the tables of then.
    anew = inner.__wrapped__ if isinstance(inner, REMEMBERING) else inner

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = stock.forward
        if now is inner:
            return running.run(self, anew, args, kwargs)
        self._safe_rope.follow_patch(now)
        return running.run(self, now, args, kwargs)

    forget_compiled(forward)
    if anew is not inner:
        vars(forward).update(cache_clear=inner.cache_clear, cache_info=inner.cache_info)
    return forward


def _bound_anew(raw: Any, inner: Any) -> Callable[..., Any]:
    """Return the method of a pinned class that ``raw`` is: a static one or a descriptor, no function."""

    def bound(module: Any, *args: Any, **kwargs: Any) -> Any:
        called = raw.__get__(module, type(module)) if hasattr(raw, "__get__") else raw
        return called(*args, **kwargs)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return running.run(self, bound, args, kwargs)

    if not callable(inner):
        return method
    functools.wraps(inner)(method)
    if isinstance(raw, staticmethod | classmethod):
        vars(method)["__signature__"] = _with_self(signature_of(inner))
    return method


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[own, *signature.parameters.values()])


def rotating_method(stock: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the method ``name`` of a pinned ``stock``, which rotates in FP32 where a patch says so."""
    inner = getattr(stock, name)

    @functools.wraps(inner)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._safe_rope.rotates(name):
            return inner(self, *args, **kwargs)
        return running.rotate(self, inner, args, kwargs)

    vars(method)["_safe_rope_rotates"] = True
    return method


def _reach_of(values: torch.Tensor) -> float:
    known = _reaches.get(values)
    return _reach(values) if known is None else known


def _reach(values: torch.Tensor) -> float:
    if not values.is_floating_point() or values.is_meta or not values.numel():
        return 0.0
    largest = float(values.abs().max())
    # Beyond 2**24 FP32 counts no further either: the most negative number in a mask is no index.
    return largest if largest <= _COUNTS_TO and bool((values == values.round()).all()) else 0.0


def _nominal(module: nn.Module, name: str, values: torch.Tensor) -> torch.dtype:
    current = get_table(module, name)
    if not isinstance(current, torch.Tensor) or values.is_complex():
        return values.dtype
    # Under zero.Init the stock model has its dtype, whatever the truthful constructor gave.
    return shadow_dtype(current) or current.dtype
