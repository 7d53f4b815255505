"""What a protected rotary module knows: its specs, its tables, and the buffers that it keeps right.

Position tables are not module state. The module's buffers are there for outside code to read; they are put
back whenever they have been replaced, cast or written to, and ``forward`` never reads them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_rope._channels import Channels
from safe_rope._pinned import sent_by
from safe_rope._row_cache import RowCache, Rows, shared_rows
from safe_rope.frequencies import Bits, RopeSpec
from safe_rope.recognition import Convention, cached_length, layer_types, position_buffers, read_spec
from safe_rope.registry import RopePatch
from safe_rope.tables import RotaryTable, StockTable, shared_table

logger = logging.getLogger(__name__)

Table = RotaryTable | StockTable


class _Pin(NamedTuple):
    """A buffer that is kept right: how to make it for a device, and its last rows, to know it by."""

    make: Callable[[torch.device], torch.Tensor]
    last: torch.Tensor | None


@dataclasses.dataclass
class Frequencies:
    """One set of frequencies of a module, and the table that belongs to it.

    ``inv_freq`` is what the buffer of that name shows, ``table`` what cos and sin come from; they differ in
    nothing but linear scaling before transformers 4.43, where the position was divided and inv_freq was not.
    """

    spec: RopeSpec
    prefix: str
    original: torch.Tensor
    inv_freq: torch.Tensor
    table: Table
    original_table: Table
    long: torch.Tensor | None = None
    long_table: Table | None = None


class RotaryState:
    """The state of one protected module; see the module's docstring."""

    def __init__(
        self,
        sets: dict[str | None, Frequencies],
        convention: Convention,
        layout: str,
        tables: str,
        apply: str,
        bits: Bits = "checkpoint",
    ) -> None:
        self.bits = bits
        self.sets = sets
        self.convention = convention
        self.layout = layout
        self.tables = tables
        self.apply = apply
        self.patch: RopePatch | None = None
        self.channels: Channels | None = None
        self.follows_x = True
        self.row_cache: RowCache | None = None
        self.shown: dict[str, tuple[RowCache, int]] = {}  # tables that forward does not read
        self._rows: Rows | None = None
        self._placed: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}

    @classmethod
    def read(
        cls,
        module: nn.Module,
        patch: RopePatch,
        convention: Convention,
        *,
        tables: str,
        apply: str,
        reference: nn.Module | None = None,
        inv_freq: Bits = "checkpoint",
    ) -> RotaryState:
        """Read the state from a rotary module, changing nothing. See `safe_rope.rewrite.plan`."""
        # What stock FP32 gives on this CPU begins with the frequencies that it computes on this CPU.
        bits: Bits = "machine" if tables == "fp32" else inv_freq
        sets: dict[str | None, Frequencies] = {}
        for layer_type in layer_types(module):
            spec = read_spec(module, patch, layer_type)
            prefix = "" if layer_type is None else f"{layer_type}_"
            shown = _shown_spec(module, spec).inv_freq(bits=bits)
            if reference is not None:
                shown = _authoritative(reference, prefix, _shown_spec(module, spec), shown)
            table = _table(tables, module, spec, shown, bits)
            sets[layer_type] = Frequencies(spec, prefix, shown, shown, table, table)
            if spec.rope_type == "longrope":
                long = spec.inv_freq(_longrope_limit(spec) + 1, bits)
                sets[layer_type].long = long
                sets[layer_type].long_table = _table(tables, module, spec, long, bits)
        state = cls(sets, convention, patch.layout, tables, apply, bits)
        if convention == "length":
            state._grow_rows(module, cached_length(module))
        else:
            state._show_tables(module)
        return state

    def of_another(self, module: nn.Module) -> RotaryState:
        """Return the state of a ``module`` of the same class that was built from the same arguments."""
        state = copy.deepcopy(self)
        if state.row_cache is not None:
            module.max_seq_len_cached = state.row_cache.length  # type: ignore[assignment]
        return state

    # ------------------------------------------------------------------ cos and sin

    def lookup(
        self, module: nn.Module, position_ids: torch.Tensor, layer_type: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return FP32 cos and sin, each [*position_ids.shape, rotary_dim // 2]."""
        if not torch.compiler.is_compiling():
            self.restore(module)
        frequencies = self.sets[layer_type]
        spec = frequencies.spec
        if not spec.depends_on_length or position_ids.numel() == 0:
            return frequencies.table.lookup(position_ids)
        length = position_ids.max() + 1
        if frequencies.long_table is None:
            self._follow_dynamic_ntk(module, frequencies, length)
            if frequencies.table is frequencies.original_table:
                return frequencies.table.lookup(position_ids)
            # Frequencies of one step only: whole tables of them on the device would cost more than a copy.
            cos, sin = frequencies.table.lookup(position_ids.cpu())
            return cos.to(position_ids.device), sin.to(position_ids.device)
        is_long = length > _longrope_limit(spec)
        if torch.compiler.is_compiling() or position_ids.device.type != "cpu":
            # Asking which set applies would stop the device: both are looked up, one is chosen.
            long = frequencies.long_table.lookup(position_ids)
            short = frequencies.original_table.lookup(position_ids)
            return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])
        table = frequencies.long_table if is_long else frequencies.original_table
        if table is not frequencies.table:
            inv_freq = frequencies.long if is_long else frequencies.original
            self._show(module, frequencies, inv_freq, table)  # type: ignore[arg-type]
        return frequencies.table.lookup(position_ids)

    def rows(self, module: nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables [at least length, rotary_dim] of a module that is called with a length."""
        if length > module.max_seq_len_cached:  # type: ignore[operator]
            frequencies = self.sets[None]
            spec = frequencies.spec
            if spec.depends_on_length and length > (spec.max_position_embeddings or 0):
                self._set_inv_freq(module, frequencies, spec.inv_freq(length, self.bits))
            self._grow_rows(module, length)
        if not torch.compiler.is_compiling():
            self.restore(module)
        assert self._rows is not None
        return self._rows

    def widen(self, half: torch.Tensor, several_axes: bool = False) -> torch.Tensor:
        """Repeat each of the rotary_dim // 2 values for both elements of its pair, as the layout has it."""
        if self.channels is not None:
            return self.channels.arrange(half, several_axes)
        if self.layout == "half":
            return torch.cat((half, half), dim=-1)
        return half.repeat_interleave(2, dim=-1)

    def _follow_dynamic_ntk(self, module: nn.Module, frequencies: Frequencies, length: torch.Tensor) -> None:
        spec = frequencies.spec
        if not hasattr(module, "original_max_seq_len"):
            # Before transformers 4.43 there was no way back: the last long sequence's frequencies stayed.
            if length > (spec.max_position_embeddings or 0):
                self._set_inv_freq(module, frequencies, spec.inv_freq(length.cpu(), self.bits))
            return
        # Grow with the longest sequence seen, come back once a sequence fits the trained length.
        name = f"{frequencies.prefix}max_seq_len_cached"
        trained = spec.max_position_embeddings or 0
        cached = getattr(module, name, module.max_seq_len_cached)
        if length > cached:  # type: ignore[operator]
            self._set_inv_freq(module, frequencies, spec.inv_freq(length.cpu(), self.bits))
            setattr(module, name, int(length))
        elif length < trained and cached > trained:  # type: ignore[operator]
            self._set_inv_freq(module, frequencies, frequencies.original)
            setattr(module, name, trained)

    def _set_inv_freq(self, module: nn.Module, frequencies: Frequencies, inv_freq: torch.Tensor) -> None:
        table = _table(self.tables, module, frequencies.spec, inv_freq, self.bits)
        self._show(module, frequencies, inv_freq, table)

    def _show(
        self, module: nn.Module, frequencies: Frequencies, inv_freq: torch.Tensor, table: Table
    ) -> None:
        frequencies.inv_freq = inv_freq
        frequencies.table = table
        self._placed.pop(f"{frequencies.prefix}inv_freq", None)
        self.restore(module)

    def _grow_rows(self, module: nn.Module, length: int) -> None:
        frequencies = self.sets[None]
        self.row_cache, self._rows = shared_rows(frequencies.table, length, self.layout), None
        self._placed.pop("cos_cached", None)
        self._placed.pop("sin_cached", None)
        module.max_seq_len_cached = length  # type: ignore[assignment]

    def _show_tables(self, module: nn.Module) -> None:
        # transformers 4.38 computes from inv_freq, and keeps tables besides for whoever asks for them.
        for name in position_buffers(module):
            values, frequencies = module._buffers.get(name), self.sets.get(None)
            if values is None or frequencies is None or name.endswith("inv_freq"):
                continue
            if values.dim() == 2 and values.shape[1] == 2 * frequencies.inv_freq.numel():
                cache = shared_rows(frequencies.original_table, len(values), self.layout)
                self.shown[name] = cache, int(name.endswith("sin_cached"))

    # ------------------------------------------------------------------ the buffers that outside code reads

    def restore(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Put back every pinned buffer that is not, untouched, the one that was put there before."""
        for name, pin in self._pins(module).items():
            current = module._buffers.get(name, module.__dict__.get(name))
            if device is None and self._is_untouched(name, current, pin):
                continue
            target = device or (current.device if isinstance(current, torch.Tensor) else torch.device("cpu"))
            self._place(module, name, pin.make(target))
        if self.row_cache is not None:
            self._rows = self.row_cache.on(module._buffers["cos_cached"].device)  # type: ignore[union-attr]

    def follow(self, module: nn.Module) -> None:
        """Put the buffers back where the module's own ``_apply`` has moved or cast them."""
        self.restore(
            module,
            next((b.device for n in self._pins(module) if (b := module._buffers.get(n)) is not None), None),
        )

    def settle(self, module: nn.Module, prefix: str, loaded: Any) -> None:
        """After a load: whatever came, the buffers are made from the spec."""
        self.restore(module)

    def _is_untouched(self, name: str, current: Any, pin: _Pin) -> bool:
        known = self._placed.get(name)
        if known is None or known[0] is not current or known[1] != _marks(current):
            return False
        # A write through ``.data`` leaves no other trace than the values; to read them stops an accelerator.
        if pin.last is None or current.device.type != "cpu" or torch._C._len_torch_dispatch_stack() > 0:
            return True
        return torch.equal(current[-len(pin.last) :], pin.last)

    @contextlib.contextmanager
    def buffers_aside(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Take the pinned buffers out while ``fn`` is applied to the rest; put them where it would have."""
        aside = {name: module._buffers[name] for name in self._pins(module) if name in module._buffers}
        device = None
        for name in aside:
            module._buffers[name] = None
        try:
            yield
            witness = next((b for b in aside.values() if b is not None), None)
            if witness is not None:
                device = sent_by(fn, witness[:1].clone()).device
        finally:
            module._buffers.update(aside)
            self.restore(module, device)

    def _pins(self, module: nn.Module) -> dict[str, _Pin]:
        pins: dict[str, _Pin] = {}
        for frequencies in self.sets.values():
            for name, values in (
                ("inv_freq", frequencies.inv_freq),
                ("original_inv_freq", frequencies.original),
            ):
                if hasattr(module, frequencies.prefix + name):
                    pins[frequencies.prefix + name] = _Pin(_copy_of(values), values)
        for name, (cache, index) in self.shown.items():
            pins[name] = _Pin(functools.partial(_shown_rows, cache, index), None)
        if self.row_cache is not None:
            for index, name in enumerate(("cos_cached", "sin_cached")):
                last = self._rows[index][-1:] if self._rows is not None and self._rows[index].is_cpu else None
                pins[name] = _Pin(functools.partial(_shown_rows, self.row_cache, index), last)
        return pins

    def _place(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        if name in module._buffers:
            module._buffers[name] = value
        else:
            module.__dict__[name] = value
        self._placed[name] = (value, _marks(value))

    # ------------------------------------------------------------------ copies

    def portable(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's attributes without its tables, which are rebuilt from the spec elsewhere."""
        pins = self._pins(module)
        attributes = {name: value for name, value in module.__dict__.items() if name not in pins}
        buffers = module._buffers
        attributes["_buffers"] = {name: None if name in pins else value for name, value in buffers.items()}
        attributes.update({name: None for name in pins if name not in buffers})
        witness = next((b for name in pins if (b := buffers.get(name)) is not None), torch.empty(0))
        # A tensor, not a device: torch.load's map_location moves it along with the rest.
        attributes["_safe_rope_device"] = witness[:0].clone()
        return attributes

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryState:
        duplicate = copy.copy(self)
        duplicate.sets = {key: dataclasses.replace(value) for key, value in self.sets.items()}
        duplicate._placed = {}
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_placed": {}, "_rows": None}


def _marks(tensor: torch.Tensor) -> tuple[int, int]:
    # A version counter tells of a write, an address of ``.data = ...``, which no counter tells of.
    return tensor._version, tensor.data_ptr() if type(tensor) is torch.Tensor else 0


def _longrope_limit(spec: RopeSpec) -> int:
    return spec.original_max_position_embeddings or spec.max_position_embeddings or 0


def _table(kind: str, module: nn.Module, spec: RopeSpec, inv_freq: torch.Tensor, bits: Bits) -> Table:
    divisor = 1.0
    if _divides_positions(module, spec):
        if kind == "fp32":
            divisor = spec.factor or 1.0
        else:
            inv_freq = spec.inv_freq(bits=bits)
    table: Table = shared_table(kind, inv_freq, spec.attention_scaling, divisor)  # type: ignore[arg-type]
    return table


def _divides_positions(module: nn.Module, spec: RopeSpec) -> bool:
    # Before 4.43 the linear classes had no rope_type and divided the position instead of inv_freq.
    return (
        spec.rope_type == "linear"
        and getattr(module, "rope_type", None) is None
        and not hasattr(module, "config")
    )


def _shown_spec(module: nn.Module, spec: RopeSpec) -> RopeSpec:
    return spec.unscaled() if _divides_positions(module, spec) else spec


def _authoritative(module: nn.Module, prefix: str, spec: RopeSpec, expected: torch.Tensor) -> torch.Tensor:
    """The inv_freq that a constructor made with nothing intercepted: what the model's authors meant.

    Where it is what this CPU makes of the config, that is ``expected``, whose bits no CPU changes.
    """
    built = getattr(module, f"{prefix}inv_freq", None)
    if not isinstance(built, torch.Tensor) or built.dtype != torch.float32 or built.device.type != "cpu":
        return expected
    if torch.equal(built, expected) or torch.equal(built, spec.inv_freq(bits="machine")):
        return expected
    logger.info("%s builds frequencies of its own; they are kept as they are", type(module).__name__)
    return built.detach().clone()


def _shown_rows(cache: RowCache, index: int, device: torch.device) -> torch.Tensor:
    return cache.shown(device, index)


def _copy_of(values: torch.Tensor) -> Callable[[torch.device], torch.Tensor]:
    # A copy: whoever writes into the buffer must not write into the truth.
    def make(device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            return values.to(device, copy=True)

    return make
