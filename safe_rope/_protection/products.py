"""Notice phases that are rounded as they are made: by autocast, or by positions in 16 bits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from safe_rope._base import bytecode
from safe_rope._base.dtypes import LOW
from safe_rope._base.tensors import tensors_in
from safe_rope._protection.calls import Call
from safe_rope._recognition.explained import LOW_PHASES
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.provenance import Origin, Provenance
from safe_rope._recognition.tables import is_turned_when_multiplied
from safe_rope.errors import PrecisionWarning
from safe_rope.rotation._cos_sin import CosSin


def are_lowered(call: Call) -> bool:
    """Whether autocast is on in a call of a module that takes matrix products."""
    return call.autocast and call.state.code.multiplies


def noticed(call: Call) -> contextlib.AbstractContextManager[Any]:
    """Warn, once for a module, where its call rounds phases.

    It multiplies frequencies by a matrix product while autocast is on, or by positions that it counts in 16
    bits. How far it counts is looked at again where a call has twice as much to count.
    """
    state = call.state
    frequencies = [name for name, pin in state.pins.items() if not pin.finished]
    if not frequencies:
        return contextlib.nullcontext()
    multiplies = are_lowered(call) and not state.runner.knows_its_products
    may_count_low = state.code.counts and (call.has_low or call.autocast)
    size = max((leaf.numel() for leaf in call.leaves), default=0) if may_count_low else 0
    counts = size > 0 and size >= 2 * state.runner.counted >= 0
    if not (multiplies or counts):
        return contextlib.nullcontext()
    state.runner.knows_its_products |= multiplies
    if counts:
        state.runner.counted = size
    return _Products(call, frequencies, multiplies, counts)


class _Products(Provenance):
    def __init__(self, call: Call, frequencies: list[str], multiplies: bool, counts: bool) -> None:
        super().__init__()
        self._owner, self._device, self._runner = call.state.owner, call.device, call.state.runner
        self._notes = call.state.notes
        self._multiplies, self._counts, self._coarse = multiplies, counts, torch.bfloat16
        self._turns = all(is_turned_when_multiplied(call.module, name) for name in frequencies)
        for name in frequencies:
            table = get_table(call.module, name)
            if isinstance(table, torch.Tensor):
                self.note(table, Origin.KEPT)

    def origin(self, tensor: torch.Tensor) -> Origin:
        """As of `Provenance`; a table that is followed is one that was noted."""
        return Origin.KEPT if isinstance(tensor, CosSin) else super().origin(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_").removeprefix("r")
        is_product = self._multiplies and name in bytecode.PRODUCTS and not _is_of_a_layer(name, args)
        if is_product and torch.is_autocast_enabled(self._device):
            origins = [self.origin(tensor) for tensor in tensors_in((args, kwargs))]
            if any(origin & Origin.KEPT and not origin & Origin.FINISHED for origin in origins):
                warnings.warn(
                    f"{self._owner} multiplies its frequencies by a matrix product while torch.autocast is "
                    "on: phases are rounded there, as in the stock model. Multiply them with "
                    "torch.autocast(..., enabled=False) around, or by an elementwise product",
                    PrecisionWarning,
                    stacklevel=2,
                )
        if self._counts:
            self._look_at_counts(list(tensors_in((args, kwargs))))
        result = super().__torch_function__(func, types, args, kwargs)
        for made in tensors_in(result) if self._counts else ():
            if _is_coarse(made, self.origin(made)):
                self.note(made, Origin.COARSE)
                self._coarse = made.dtype
        return result

    def _look_at_counts(self, operands: list[torch.Tensor]) -> None:
        """Warn where one of ``operands`` is a frequency, and another a count beyond what its dtype holds.

        Powers of exponents are no phase for `CosSin`: they are rounded to 16 bits where they meet any count.
        """
        origins = [self.origin(tensor) for tensor in operands]
        if not any(origin & Origin.KEPT and not origin & Origin.FINISHED for origin in origins):
            return
        are_powers = self._turns and any(map(self._are_powers, operands))
        for tensor, origin in zip(operands, origins, strict=True):
            is_rounding = are_powers and _is_low_count(tensor, origin)
            is_rounding |= _is_coarse(tensor, origin) or bool(origin & Origin.COARSE)
            if not is_rounding or origin & Origin.KEPT:
                continue
            dtype = tensor.dtype if tensor.dtype in LOW else self._coarse
            self._counts, self._runner.counted = False, -1
            self._notes.setdefault("phases", LOW_PHASES)
            warnings.warn(
                f"{self._owner} multiplies its frequencies by positions counted in {dtype}, which counts "
                f"no further than {_last_counted(dtype)}: phases are rounded there, as in the stock model. "
                "Count them in torch.float32 or as integers",
                PrecisionWarning,
                stacklevel=2,
            )
            return

    def _are_powers(self, tensor: torch.Tensor) -> bool:
        origin = super().origin(tensor)
        is_followed = isinstance(tensor, CosSin) and tensor.phase is None and tensor.nominal in LOW
        return is_followed and bool(origin & Origin.KEPT) and not origin & Origin.FINISHED


def _is_of_a_layer(name: str, args: Any) -> bool:
    """Whether a product is that of a layer of weights, whose input is rounded as any activation is."""
    return name == "linear" and any(isinstance(one, nn.Parameter) for one in args)


def _is_coarse(tensor: torch.Tensor, origin: Origin) -> bool:
    """Whether a tensor holds more counts than its dtype tells apart."""
    return _is_low_count(tensor, origin) and tensor.numel() > _last_counted(tensor.dtype)


def _is_low_count(tensor: torch.Tensor, origin: Origin) -> bool:
    is_count = bool(origin & Origin.COUNTED) and not origin & (Origin.KEPT | Origin.FINISHED)
    return is_count and tensor.dtype in LOW and tensor.numel() > 1


def _last_counted(dtype: torch.dtype) -> int:
    return int(2 / torch.finfo(dtype).eps)
