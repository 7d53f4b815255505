"""Turn a rotary module into a protected one: its positions come from a spec, not from its buffers.

The instance keeps its identity, its attributes and its buffers' names; its class becomes a subclass of the
stock class with the same name. What changes is where cos and sin come from (`safe_rope.tables`, shared by
all layers) and that the buffers which outside code reads are put back, right and FP32, after whatever was
done to them.
"""

from __future__ import annotations

import copyreg
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from safe_rope import application
from safe_rope._pinned import PinnedState, pinned_forward, rotating_method
from safe_rope._rotary_state import RotaryState
from safe_rope._row_cache import checked_once
from safe_rope.errors import UnsupportedModelError
from safe_rope.frequencies import Bits
from safe_rope.recognition import calling_convention
from safe_rope.registry import RopePatch
from safe_rope.rotation import marked

_classes: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()
_STATE = "_safe_rope"


def is_protected(module: nn.Module) -> bool:
    """Whether ``module`` is a rotary module that `protect_module` has rewritten."""
    return isinstance(module, ProtectedRotary)


def is_pinned(module: nn.Module) -> bool:
    """Whether ``module`` computes as it did, on tables that `pin_module` keeps right."""
    return isinstance(module, PinnedPositions)


def state_of(module: nn.Module) -> RotaryState:
    """The state of a protected module: its specs, tables and pinned buffers."""
    return module._safe_rope  # type: ignore[return-value]


def settle(modules: Iterable[nn.Module]) -> None:
    """Put the tables of protected and pinned modules back, whatever has been written to them."""
    with checked_once():
        for module in modules:
            if isinstance(module, ProtectedModule):
                state: Any = module._safe_rope
                state._placed.clear()
                state.restore(module)


def plan(
    module: nn.Module,
    patch: RopePatch,
    *,
    tables: str,
    apply: str,
    reference: nn.Module | None = None,
    inv_freq: Bits = "checkpoint",
) -> RotaryState:
    """Work out everything that protecting ``module`` needs, and change nothing.

    Args:
        module: a rotary module that ``patch`` covers.
        patch: the patch that covers it.
        tables: ``"exact"`` or ``"fp32"``.
        apply: ``"fp32"`` or ``"stock"``.
        reference: the same module as its constructor makes it with nothing intercepted; its inv_freq is
            authoritative.
        inv_freq: ``"checkpoint"`` or ``"exact"``, see `safe_rope.frequencies.RopeSpec.inv_freq`.

    Raises:
        ConfigError: the module's configuration contradicts itself.
        UnsupportedModelError: the module's class is not called as rotary modules are.
    """
    stock = stock_class(module)
    convention = calling_convention(stock)
    if convention is None:
        raise UnsupportedModelError(
            f"{stock.__module__}.{stock.__name__}.forward takes neither position_ids nor seq_len; "
            f"take the class out of the patch {patch.family!r} or protect it by a patch of its own"
        )
    return RotaryState.read(
        module, patch, convention, tables=tables, apply=apply, reference=reference, inv_freq=inv_freq
    )


def protect_module(module: nn.Module, patch: RopePatch, state: RotaryState) -> None:
    """Make ``module`` draw its cos and sin from ``state`` for the rest of its life."""
    stock = stock_class(module)
    state.patch = patch
    _take_over(module, ProtectedRotary, state)
    if type(module) is not stock:
        application.acquire(module, patch)
    state.restore(module)


def pin_module(
    module: nn.Module, tables: dict[str, tuple[torch.Tensor, bool]], patch: RopePatch | None = None
) -> None:
    """Keep the named ``tables`` of ``module`` for the rest of its life.

    Args:
        module: any module; its class becomes a subclass of the stock class with the same name.
        tables: for each buffer or attribute its true values, on CPU, and whether they are ready for use
            (`safe_rope._provenance.Origin.FINISHED`).
        patch: how the cos and sin that the module returns or holds are applied in FP32; None where they are
            applied as the stock model does it.

    Raises:
        UnsupportedModelError: the class cannot be derived from.

    """
    state = PinnedState(module, tables, patch)
    try:
        _take_over(module, PinnedPositions, state)
    except TypeError as error:
        module.__dict__.pop(_STATE, None)
        raise UnsupportedModelError(
            f"{type(module).__name__} does not let its class be replaced ({error}); protect it by a RopePatch"
        ) from error
    if patch is not None and patch.source == "states":
        _add_methods(type(module), patch)
    elif patch is not None:
        application.acquire(module, patch)
    state.restore(module)


def _take_over(module: nn.Module, kind: type[ProtectedModule], state: Any) -> None:
    if not isinstance(module, kind):
        module.__class__ = _protected_class(stock_class(module), kind)
    module.__dict__[_STATE] = state


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before it was protected."""
    cls = type(module)
    return cls._safe_rope_stock if issubclass(cls, ProtectedModule) else cls


def _protected_class(stock: type[nn.Module], kind: type[ProtectedModule]) -> type[nn.Module]:
    known = _classes.setdefault(stock, {})
    protected = known.get(kind)
    if protected is None:
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "_safe_rope_stock": stock,
            "forward": kind.make_forward(stock),
        }
        metaclass: Any = type(stock)
        protected = known[kind] = metaclass(stock.__name__, (kind, stock), namespace)
    return protected


def _add_methods(cls: Any, patch: RopePatch) -> None:
    """Give a pinned class the methods that rotate in FP32, besides forward."""
    for name in patch.applications:
        if name != "forward" and name not in vars(cls) and hasattr(cls._safe_rope_stock, name):
            setattr(cls, name, rotating_method(cls._safe_rope_stock, name))


def _forward_by_positions(stock: type[nn.Module]) -> Callable[..., Any]:
    by_layer_type = "layer_type" in inspect.signature(stock.forward).parameters

    @torch.no_grad()
    def forward(
        self: nn.Module,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str | None = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [*position_ids.shape, rotary_dim], FP32."""
        state = state_of(self)
        cos, sin = state.lookup(self, position_ids, layer_type if by_layer_type else None)
        several_axes = position_ids.dim() == 3
        return _deliver(state, x, state.widen(cos, several_axes), state.widen(sin, several_axes))

    return forward


def _forward_by_length(stock: type[nn.Module]) -> Callable[..., Any]:
    @torch.no_grad()
    def forward(
        self: nn.Module, x: torch.Tensor, seq_len: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first seq_len rows of cos and sin, each [seq_len, rotary_dim], FP32."""
        if seq_len is None:
            raise TypeError(f"{stock.__name__} needs seq_len, the number of rows that are wanted; got None")
        state = state_of(self)
        cos, sin = state.rows(self, seq_len)
        return _deliver(state, x, cos[:seq_len], sin[:seq_len])

    return forward


_FORWARDS = {"positions": _forward_by_positions, "length": _forward_by_length}


def _deliver(
    state: RotaryState, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if state.apply == "fp32":
        return marked(cos.to(x.device)), marked(sin.to(x.device))
    dtype = x.dtype if state.follows_x else cos.dtype
    return cos.to(x.device, dtype), sin.to(x.device, dtype)


class ProtectedModule:
    """What a protected or pinned module does differently from its stock class, besides ``forward``."""

    _safe_rope_stock: type[nn.Module]

    @staticmethod
    def make_forward(stock: type[nn.Module]) -> Callable[..., Any]:
        """Return the forward of a module whose stock class is ``stock``."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # The tables take no part: only where ``fn`` would have put them is asked.
        state = state_of(self)  # type: ignore[arg-type]
        if self._safe_rope_stock._apply is not nn.Module._apply:
            # An _apply of the class's own may look at the tables, as timm's does to make them anew.
            result = super()._apply(fn)  # type: ignore[misc]
            state.follow(self)  # type: ignore[arg-type]
            return result
        with state.buffers_aside(self, fn):  # type: ignore[arg-type]
            return super()._apply(fn) if recurse else super()._apply(fn, recurse)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]
        state_of(self).settle(self, prefix, state_dict)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickle finds classes by name, and the name is the stock class's: name that, and rewrite on the way
        # back.
        attributes = state_of(self).portable(self)  # type: ignore[arg-type]
        kind = ProtectedRotary if isinstance(self, ProtectedRotary) else PinnedPositions
        return _rebuild, (self._safe_rope_stock, kind), attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        device = attributes.pop(f"{_STATE}_device").device
        super().__setstate__(attributes)  # type: ignore[misc]
        state = state_of(self)  # type: ignore[arg-type]
        if state.patch is not None and state.patch.source == "states":
            _add_methods(type(self), state.patch)
        elif state.patch is not None:
            application.acquire(self, state.patch)
        state.restore(self, device)  # type: ignore[arg-type]


class ProtectedRotary(ProtectedModule):
    """A rotary module whose cos and sin come from a spec."""

    @staticmethod
    def make_forward(stock: type[nn.Module]) -> Callable[..., Any]:
        forward = _FORWARDS[calling_convention(stock)](stock)  # type: ignore[index]
        # Who asks for the signature is to see the stock one.
        forward.__signature__ = inspect.signature(stock.forward)  # type: ignore[attr-defined]
        return forward


class PinnedPositions(ProtectedModule):
    """A module that computes as it did, on tables that stay right."""

    @staticmethod
    def make_forward(stock: type[nn.Module]) -> Callable[..., Any]:
        return pinned_forward(stock)


def _rebuild(stock: type[nn.Module], kind: type[ProtectedModule]) -> nn.Module:
    module: nn.Module = copyreg.__newobj__(_protected_class(stock, kind))  # type: ignore[attr-defined]
    return module
