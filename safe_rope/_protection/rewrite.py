"""Turn a rotary module into a protected one: its positions come from a spec, not from its buffers.

The instance keeps its identity, its attributes and its buffers' names; its class becomes a subclass of the
stock class with the same name. Two things change. cos and sin come from `safe_rope.tables`, shared by all
layers. And the buffers that outside code reads are put back, correct and FP32, after whatever was done to
them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from safe_rope._base import bytecode
from safe_rope._base.functions import signature_of
from safe_rope._base.positions import is_watched
from safe_rope._base.torch_private import PARAMETRIZED, is_learned
from safe_rope._protection.derived import derived
from safe_rope._protection.handed_out import mark_above
from safe_rope._protection.keeper import Keeper
from safe_rope._protection.pinned import PinnedState, pinned_attribute, pinned_forward, rotating_method
from safe_rope._protection.rebound import lead_to_its_class
from safe_rope._protection.rotary import RotaryState
from safe_rope._protection.shown import STATE, is_shown, seen, show
from safe_rope._protection.traced import is_traced, run_traced, scripted
from safe_rope._recognition.applications import Applications
from safe_rope._recognition.explained import LOST
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import calling_convention
from safe_rope.errors import UnsupportedModelError
from safe_rope.rotation import _installed
from safe_rope.rotation._marks import marked
from safe_rope.tables._rows import checked_once

_COPIES = ("__deepcopy__", "__copy__")
OF_SKIP_INIT = "_old_apply_of_skip_init_hook"
"""The ``_apply`` that zero.Init puts back into a class, or into one derived from it, after a skip_init."""
_classes: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()


def is_protected(module: nn.Module) -> bool:
    """Whether ``module`` is a rotary module that `protect_module` has rewritten."""
    return isinstance(module, ProtectedRotary)


def is_pinned(module: nn.Module) -> bool:
    """Whether ``module`` computes as it did, on tables that `pin_module` keeps right."""
    return isinstance(module, PinnedPositions)


def is_kept(module: nn.Module) -> bool:
    """Whether ``module`` is a protected or a pinned one."""
    return isinstance(module, ProtectedModule)


def state_of(module: nn.Module) -> Any:
    """What a protected module knows: a `RotaryState`, or a `PinnedState` where it is pinned."""
    return module._safe_rope


def settle(modules: Iterable[nn.Module]) -> None:
    """Put the tables of protected and pinned modules back, whatever has been written to them."""
    with checked_once():
        for module in modules:
            if STATE in vars(module) and not isinstance(module, ProtectedModule):
                _pin_again(module)
            if isinstance(module, ProtectedModule):
                state_of(module).restore(module)
                keep_up(module)


def protect_module(module: nn.Module, state: RotaryState) -> None:
    """Make ``module`` draw its cos and sin from ``state`` for the rest of its life."""
    _take_over(module, ProtectedRotary, state)
    _acquire(module, state)
    state.restore(module)
    _show_properties(module)


def _pin_again(module: nn.Module) -> None:
    """Pin a protected module that somebody has given another class since."""
    state = vars(module).pop(STATE)
    finished = {name: pin.finished for name, pin in getattr(state, "pins", {}).items()}
    cpu, names = torch.device("cpu"), list(state.names(module))
    pin_module(
        module, {n: (state.make(module, n, cpu), finished.get(n, not n.endswith("inv_freq"))) for n in names}
    )


def keep_up(module: Any) -> None:
    """Pin a fully protected module in which somebody has put what no table of a spec has, values and all."""
    state = state_of(module)
    if not isinstance(state, RotaryState) or not state.overruled:
        return
    cpu = torch.device("cpu")
    names = list(state.names(module))
    tables = {name: (state.make(module, name, cpu), not name.endswith("inv_freq")) for name in names}
    for name, values in state.overruled.items():
        if name in tables:
            tables[name] = (values, tables[name][1])
    pinned = PinnedState(module, tables, None if state.apply == "stock" else state.applied)
    pinned.nominal.update({name: dtype for name, dtype in state.nominal.items() if name in tables})
    pinned.adopted, pinned.before = state.adopted, state.before
    pinned.notes.update({**state.notes, **dict.fromkeys(state.lost, LOST)})
    _become(module, _protected_class(stock_class(module), PinnedPositions))
    vars(module)[STATE] = pinned
    pinned.restore(module)
    _show_properties(module)


def pin_module(
    module: nn.Module, tables: dict[str, tuple[torch.Tensor, bool]], applied: Applications | None = None
) -> None:
    """Keep the named ``tables`` of ``module`` for the rest of its life.

    Args:
        module: any module; its class becomes a subclass of the stock class with the same name.
        tables: for each buffer or attribute its true values, on CPU, and whether they are ready for use
            (`safe_rope._recognition.provenance.Origin.FINISHED`).
        applied: how the cos and sin that the module returns or holds are applied in FP32; None where they
            are applied as the stock model does it.

    Raises:
        UnsupportedModelError: the class cannot be derived from.

    """
    state = PinnedState(module, tables, applied)
    try:
        _take_over(module, PinnedPositions, state)
    except TypeError as error:
        module.__dict__.pop(STATE, None)
        raise UnsupportedModelError(
            f"{type(module).__name__} does not let its class be replaced ({error}); protect it by a RopePatch"
        ) from error
    _acquire(module, state)
    state.restore(module)
    _show_properties(module)


def _take_over(module: nn.Module, kind: type[ProtectedModule], state: Any) -> None:
    if not isinstance(module, kind):
        _become(module, _protected_class(stock_class(module), kind))
    module.__dict__[STATE] = state


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    before = type(module)
    object.__setattr__(module, "__class__", cls)  # a class's own __setattr__ may refuse
    lead_to_its_class(module, before)


def _acquire(module: nn.Module, state: Keeper) -> None:
    """Have what applies the positions of ``module`` do so in FP32 as long as it lives."""
    if state.applied is None:
        return
    if state.applied.how == "methods":
        _add_methods(type(module), state.applied.methods)
    else:
        _installed.acquire(module, state.applied.places)


def _protected_class(stock: type[nn.Module], kind: type[ProtectedModule]) -> type[nn.Module]:
    known = _classes.setdefault(stock, {})
    protected = known.get(kind)
    if protected is None:
        forward: Any = kind.make_forward(stock)
        # Dynamo keeps a few graphs for each code object: those of one class are not those of another.
        forward.__code__ = forward.__code__.replace()
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "_safe_rope_stock": stock,
            "__init__": _initializer(stock),
            "forward": forward,
            # A skip_init inside of zero.Init gives torch's to each class without one of its own.
            **dict.fromkeys(("_apply", OF_SKIP_INIT), kind._apply),
        }
        if kind is PinnedPositions:
            for name, of_forward in bytecode.makers(stock).items():
                if name not in vars(ProtectedModule):  # which calls the stock one, in its turn
                    namespace[name] = pinned_attribute(stock, name, of_forward=of_forward)
            if stock.forward is nn.Module.forward and stock.__call__ is not nn.Module.__call__:
                namespace["__call__"] = pinned_attribute(stock, "__call__", of_forward=False)
        for name in _COPIES:
            if callable(getattr(stock, name, None)):
                namespace[name] = _copying(stock, name)
        protected = known[kind] = derived(stock.__name__, (kind, stock), namespace)
    return protected


def _copying(stock: Any, name: str) -> Callable[..., Any]:
    """Return a class's own ``__deepcopy__`` or ``__copy__``, whose copies keep their tables, too."""

    def copied(self: Any, *memo: Any) -> Any:
        with seen("exact"):
            other = getattr(stock, name)(self, *memo)
        if type(other) in (stock, type(self)) and STATE not in vars(other):
            _take_along(self, other, *memo)
        return other

    return copied


def _take_along(module: Any, other: Any, *memo: Any) -> None:
    """Protect a copy that an author's own method has made; as stock where its tables have another shape."""
    state = state_of(module)
    held: dict[str, Any] = {name: get_table(other, name) for name in state.names(module)}
    if any(_shape(one) != _shape(get_table(module, name)) for name, one in held.items()):
        if type(other) is type(module):
            _become(other, stock_class(module))
        return
    by_constructor = type(other) is not type(module)
    _become(other, type(module))
    vars(other)[STATE] = copy.deepcopy(state, *memo)
    if by_constructor:
        state_of(other).nominal.update({name: t.dtype for name, t in held.items() if t is not None})
    _acquire(other, state_of(other))
    state_of(other).settle(other, "", dict.fromkeys(other._buffers))
    _show_properties(other)


def _shape(table: Any) -> Any:
    return table.shape if isinstance(table, torch.Tensor) else table


def _initializer(stock: type[nn.Module]) -> Callable[..., None]:
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_parameters" in vars(self):
            stock.__init__(self, *args, **kwargs)
        else:
            _become(self, stock)
            self.__init__(*args, **kwargs)

    initialize.__signature__ = signature_of(stock.__init__)  # type: ignore[attr-defined]
    return initialize


def _show_properties(module: Any) -> None:
    """Let whoever reads a table from outside see it so that it fits the rest of the model."""
    state = state_of(module)
    for name in state.names(module):
        show(module, name)
    state.is_shown = all(is_shown(module, name) for name in state.names(module))


def _add_methods(cls: Any, methods: tuple[str, ...]) -> None:
    """Give a pinned class the methods that rotate in FP32, besides forward."""
    for name in methods:
        there = hasattr(vars(cls).get(name), "_safe_rope_rotates")
        if name != "forward" and not there and hasattr(cls._safe_rope_stock, name):
            setattr(cls, name, rotating_method(cls._safe_rope_stock, name))


def _forward_by_positions(stock: type[nn.Module]) -> Callable[..., Any]:
    by_layer_type = "layer_type" in signature_of(stock.forward).parameters
    inner, plain_call = stock.forward, _plain_calls(stock, "position_ids")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [*position_ids.shape, rotary_dim], FP32."""
        state, call = state_of(self), plain_call(args, kwargs)
        if call is None and is_traced((*args, *kwargs.values())):
            traced = functools.partial(inner, self, *args, **kwargs)
            return run_traced(self, traced, traced)  # type: ignore[no-any-return]
        is_live = not is_watched()
        if _is_overruled(self, is_live, unlike=stock.forward is not inner):
            return self.forward(*args, **kwargs)  # type: ignore[no-any-return]
        if call is None or (not is_live and (state.is_set_otherwise(self) or state.is_learned(self))):
            return _called_otherwise(self, inner, args, kwargs)  # type: ignore[no-any-return]
        x, position_ids, layer_type = call
        layer_type = layer_type if by_layer_type else None
        if is_live and (step := state.step(x, position_ids, layer_type)):
            return step  # type: ignore[no-any-return]
        cos, sin = state.lookup(self, position_ids, layer_type)
        several_axes = position_ids.dim() == 3
        return _deliver(state, x, state.widen(cos, several_axes), state.widen(sin, several_axes))

    return forward


def _forward_by_length(stock: type[nn.Module]) -> Callable[..., Any]:
    inner, plain_call = stock.forward, _plain_calls(stock, "seq_len")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first seq_len rows of cos and sin, each [seq_len, rotary_dim], FP32."""
        state, call = state_of(self), plain_call(args, kwargs)
        is_live = not is_watched()
        if _is_overruled(self, is_live, unlike=stock.forward is not inner):
            return self.forward(*args, **kwargs)  # type: ignore[no-any-return]
        if call is None or (not is_live and (state.is_set_otherwise(self) or state.is_learned(self))):
            return _called_otherwise(self, inner, args, kwargs)  # type: ignore[no-any-return]
        x, seq_len, _ = call
        cos, sin = state.rows(self, seq_len)
        return _deliver(state, x, cos[:seq_len], sin[:seq_len])

    return forward


def _plain_calls(stock: type[nn.Module], asked: str) -> Callable[[Any, Any], tuple[Any, Any, Any] | None]:
    """Return what reads x, ``asked`` and layer_type of a call of forward; None where it says more."""
    parameters = [*signature_of(stock.forward).parameters.values()][1:]
    names = tuple(p.name for p in parameters)
    defaults = {p.name: p.default for p in parameters}

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
        given = dict(zip(names[: len(args)], args, strict=len(args) <= len(names)))
        if len(args) > len(names) or any(name in given for name in kwargs):
            return None
        given.update(kwargs)
        x, where = given.pop(names[0], None), given.pop(asked, None)
        layer_type = given.pop("layer_type", None)
        if not isinstance(x, torch.Tensor) or where is None or isinstance(where, torch.fx.Proxy):
            return None
        if isinstance(where, torch.Tensor) and where.is_floating_point() and is_learned(where):
            return None
        # A default is what the stock forward was asked with when it was compared.
        if any(value is not defaults.get(name, given) for name, value in given.items()):
            return None
        return x, where, layer_type

    return read


def _called_otherwise(
    module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what ``inner``, the stock forward, does with such arguments; pin the module if it takes them.

    Raises:
        TypeError: it cannot do without what is missing.

    """
    try:
        result = inner(module, *args, **kwargs)
    except Exception as error:
        if any(value is None for value in (*args, *kwargs.values())) or len(args) + len(kwargs) < 2:
            takes = signature_of(inner)
            raise TypeError(
                f"{type(module).__name__}.forward takes {takes}; got None, or fewer arguments"
            ) from error
        raise
    if is_watched():
        return result
    _is_overruled(module, is_live=True, unlike=True)
    return module.forward(*args, **kwargs)


def _is_overruled(module: nn.Module, is_live: bool, *, unlike: bool = False) -> bool:
    """Put the tables back; tell whether the module is pinned from here on, by what somebody put there.

    Args:
        module: a protected module.
        is_live: whether nobody records or transforms what happens.
        unlike: whether the class has another forward than when the module was protected, or is called in
            another way.

    """
    if is_live:
        if unlike:
            state_of(module).overruled["forward"] = torch.empty(0)
        state_of(module).restore(module)
        keep_up(module)
    return is_pinned(module)


_FORWARDS = {"positions": _forward_by_positions, "length": _forward_by_length}


def _deliver(
    state: RotaryState, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x.dtype if state.follows_x else cos.dtype
    if cos.device != x.device:
        cos, sin = cos.to(x.device), sin.to(x.device)
    if state.apply == "fp32" and (state.applied_in_graphs or not torch.compiler.is_compiling()):
        return marked(cos, dtype), marked(sin, dtype)
    return cos.to(dtype), sin.to(dtype)


if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # the stock class follows in the order of resolution


class ProtectedModule(_Module):
    """What a protected or pinned module does differently from its stock class, besides ``forward``."""

    _safe_rope_stock: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """``type(module)(...)``: another one of the stock class, which nothing is known of.

        ``cls.__new__(cls)`` has no attributes yet: DataParallel, Dynamo and parametrizations copy so.
        """
        if cls.__module__ != PARAMETRIZED and (
            args or kwargs or cls._safe_rope_stock.__new__ is not object.__new__
        ):
            return cls._safe_rope_stock(*args, **kwargs)
        return object.__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # The protected class is no class of its author's: what hears of those does not hear of it.
        if "_safe_rope_stock" not in vars(cls):
            super().__init_subclass__(**kwargs)

    @staticmethod
    def make_forward(stock: type[nn.Module]) -> Callable[..., Any]:
        """Return the forward of a module whose stock class is ``stock``."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # The tables take no part: only where ``fn`` would have put them is asked.
        state = state_of(self)
        mark_above(fn)
        state.keep_come(self)
        if inspect.unwrap(self._safe_rope_stock._apply) is not inspect.unwrap(nn.Module._apply):
            # An _apply of the class's own may look at the tables, as timm's does to make them anew.
            state.show(self)
            with state.caches_sent(self, fn) as applied:
                result = _as_stock(self)._apply(applied)
            state.follow(self)
        else:
            with state.caches_sent(self, fn) as applied, state.buffers_aside(self, fn):
                result = _as_stock(self)._apply(applied, *(() if recurse else (False,)))
        keep_up(self)
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        _is_overruled(self, not is_watched())  # what was cast by another way has another dtype
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = state_of(self)
        for name in (*state.names(self), *state.caches):
            table = destination.get(prefix + name)
            if isinstance(table, torch.Tensor) and not isinstance(table, nn.Parameter):
                destination[prefix + name] = state.saved(name, table)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        _is_overruled(self, not is_watched())  # what was written to a table before is judged before
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        state_of(self).settle(self, prefix, state_dict)
        keep_up(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickle finds classes by name, and the name is the stock class's: name that, and rewrite on the way
        # back.
        if type(self).__module__ == PARAMETRIZED:
            return _as_stock(self).__reduce_ex__(protocol)  # type: ignore[no-any-return]
        _is_overruled(self, not is_watched())  # what was written to a table goes along
        attributes = state_of(self).portable(self)
        attributes[STATE] = copy.deepcopy(attributes[STATE])  # a shallow copy goes its own way
        kind = ProtectedRotary if isinstance(self, ProtectedRotary) else PinnedPositions
        return _rebuild, (self._safe_rope_stock, kind), attributes

    def __prepare_scriptable__(self) -> nn.Module:
        return scripted(self, state_of(self))

    def _replicate_for_data_parallel(self) -> Any:
        # Each replica has buffers on a device of its own, and a thread.
        replica = _as_stock(self)._replicate_for_data_parallel()
        replica.__dict__[STATE] = copy.deepcopy(state_of(self))
        return replica

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        _as_stock(self).__setstate__(attributes)
        state = state_of(self)
        _acquire(self, state)
        state.restore(self)
        _show_properties(self)


def _as_stock(module: ProtectedModule) -> Any:
    """Return ``module`` with the methods of its stock class."""
    return super(ProtectedModule, module)


class ProtectedRotary(ProtectedModule):
    """A rotary module whose cos and sin come from a spec."""

    @staticmethod
    def make_forward(stock: type[nn.Module]) -> Callable[..., Any]:
        forward = _FORWARDS[calling_convention(stock)](stock)  # type: ignore[index]
        # inspect.signature() shows the stock signature.
        forward.__signature__ = signature_of(stock.forward)  # type: ignore[attr-defined]
        return forward


class PinnedPositions(ProtectedModule):
    """A module that computes as it did, on tables that stay right."""

    @staticmethod
    def make_forward(stock: type[nn.Module]) -> Callable[..., Any]:
        return pinned_forward(stock)


def _rebuild(stock: type[nn.Module], kind: type[ProtectedModule]) -> nn.Module:
    module: nn.Module = object.__new__(_protected_class(stock, kind))
    return module
