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
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from safe_rope import application
from safe_rope._rotary_state import RotaryState
from safe_rope.errors import UnsupportedModelError
from safe_rope.frequencies import Bits
from safe_rope.recognition import calling_convention
from safe_rope.registry import RopePatch, find
from safe_rope.rotation import marked

_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()
_STATE = "_safe_rope"


def is_protected(module: nn.Module) -> bool:
    """Whether ``module`` is a rotary module that `protect_module` has rewritten."""
    return isinstance(module, ProtectedRotary)


def state_of(module: nn.Module) -> RotaryState:
    """The state of a protected module: its specs, tables and pinned buffers."""
    return module._safe_rope  # type: ignore[return-value]


def plan(
    module: nn.Module,
    patch: RopePatch,
    *,
    tables: str,
    apply: str,
    constructed: bool = False,
    inv_freq: Bits = "checkpoint",
) -> RotaryState:
    """Work out everything that protecting ``module`` needs, and change nothing.

    Args:
        module: a rotary module that ``patch`` covers.
        patch: the patch that covers it.
        tables: ``"exact"`` or ``"fp32"``.
        apply: ``"fp32"`` or ``"stock"``.
        constructed: the module has just been built with nothing intercepted, so its inv_freq is
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
        module, patch, convention, tables=tables, apply=apply, constructed=constructed, inv_freq=inv_freq
    )


def protect_module(module: nn.Module, patch: RopePatch, state: RotaryState) -> None:
    """Make ``module`` draw its cos and sin from ``state`` for the rest of its life."""
    stock = stock_class(module)
    module.__dict__[_STATE] = state
    if not is_protected(module):
        module.__class__ = _protected_class(stock)
        application.acquire(module, patch)
    state.restore(module)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before it was protected."""
    cls = type(module)
    if not is_protected(module):
        return cls
    # Not a fixed place: fully_shard puts a class of its own before them.
    return cls.__mro__[cls.__mro__.index(ProtectedRotary) + 1]


def _protected_class(stock: type[nn.Module]) -> type[nn.Module]:
    protected = _classes.get(stock)
    if protected is None:
        forward = _FORWARDS[calling_convention(stock)](stock)  # type: ignore[index]
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
        }
        protected = type(stock.__name__, (ProtectedRotary, stock), {**namespace, "forward": forward})
        _classes[stock] = protected
    return protected


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
        return _deliver(state, x, state.widen(cos), state.widen(sin))

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
    return cos.to(x.device, x.dtype), sin.to(x.device, x.dtype)


class ProtectedRotary:
    """What a protected module does differently from its stock class, besides ``forward``."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # The tables take no part: only where ``fn`` would have put them is asked.
        state = state_of(self)  # type: ignore[arg-type]
        with state.buffers_aside(self, fn):  # type: ignore[arg-type]
            return super()._apply(fn, recurse)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        state_of(self).restore(self)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickle finds classes by name, and the name is the stock class's: name that, and rewrite on the way
        # back.
        attributes = state_of(self).portable(self)  # type: ignore[arg-type]
        return _rebuild, (stock_class(self),), attributes  # type: ignore[arg-type]

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        device = attributes.pop(f"{_STATE}_device").device
        super().__setstate__(attributes)  # type: ignore[misc]
        state_of(self).restore(self, device)  # type: ignore[arg-type]


def _rebuild(stock: type[nn.Module]) -> nn.Module:
    module: nn.Module = copyreg.__newobj__(_protected_class(stock))  # type: ignore[attr-defined]
    patch = find(stock)
    if patch is not None:
        application.acquire(module, patch)
    return module
