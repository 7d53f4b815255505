"""Notice phases that a matrix product makes under torch.autocast, which rounds both sides first."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from safe_rope._base import bytecode
from safe_rope._base.tensors import tensors_in
from safe_rope._protection.stand_ins import Call
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.provenance import Origin, Provenance
from safe_rope.errors import PrecisionWarning


def are_lowered(call: Call) -> bool:
    """Whether autocast is on in a call of a module that takes matrix products."""
    return call.autocast and call.state.code.multiplies


def noticed(call: Call) -> contextlib.AbstractContextManager[Any]:
    """Warn, once for a module, where its call multiplies frequencies while autocast is on."""
    state = call.state
    frequencies = [name for name, pin in state.pins.items() if not pin.finished]
    if call.watched or state.runner.knows_its_products or not frequencies or not are_lowered(call):
        return contextlib.nullcontext()
    state.runner.knows_its_products = True
    return _Products(call, frequencies)


class _Products(Provenance):
    def __init__(self, call: Call, frequencies: list[str]) -> None:
        super().__init__()
        self._owner, self._device = call.state.owner, call.device
        for name in frequencies:
            table = get_table(call.module, name)
            if isinstance(table, torch.Tensor):
                self.note(table, Origin.KEPT)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_").removeprefix("r")
        if name in bytecode.PRODUCTS and torch.is_autocast_enabled(self._device):
            origins = [self.origin(tensor) for tensor in tensors_in((args, kwargs))]
            if any(origin & Origin.KEPT and not origin & Origin.FINISHED for origin in origins):
                warnings.warn(
                    f"{self._owner} multiplies its frequencies by a matrix product while torch.autocast is "
                    "on: phases are rounded there, as in the stock model. Multiply them with "
                    "torch.autocast(..., enabled=False) around, or by an elementwise product",
                    PrecisionWarning,
                    stacklevel=2,
                )
        return super().__torch_function__(func, types, args, kwargs)
