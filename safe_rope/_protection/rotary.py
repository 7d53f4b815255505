"""What a protected rotary module knows: its specs, its tables, and the buffers that it keeps right.

Position tables are not module state. The module's buffers are there for outside code to read; they are put
back whenever they have been replaced, cast or written to, and ``forward`` never reads them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from safe_rope._base import originals
from safe_rope._base.carried import Carried
from safe_rope._base.forwards import method, reads_of, setting
from safe_rope._base.positions import is_watched
from safe_rope._base.torch_private import is_learned
from safe_rope._protection.frequency_sets import Frequencies, Table, read_sets, spec_now, table_of
from safe_rope._protection.keeper import Keeper
from safe_rope._recognition.channels import Channels
from safe_rope._recognition.holdings import get_table
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.specs import (
    Convention,
    cached_length,
    divides_positions,
    position_buffers,
    trained_length,
)
from safe_rope.constructors._shadow import shadow_dtype
from safe_rope.frequencies import Bits
from safe_rope.registry import RopePatch
from safe_rope.rotation._ahead import ROWS, Ahead
from safe_rope.rotation._cos_sin import CosSin
from safe_rope.tables import RotaryTable, _fractions
from safe_rope.tables._rows import RowCache, Rows, shared_rows

_KEPT_BY_TABLES = ("max_seq_len_cached", "original_max_seq_len")
"""Lengths that a stock forward writes down, and that follow the tables here."""
_LARGEST_STEP = 32
"""Sequences and position axes of a step beyond which nothing is made ahead."""
_LAST_AHEAD = 1 << 31

_ROUNDING = 2.0**-20
"""How far FP32's cos and sin may be off for each position: eight ulps of a phase, as in the audit."""

Make = Callable[[torch.device], torch.Tensor]


class RotaryState(Keeper):
    """The state of one protected module; see the module's docstring."""

    def __init__(
        self,
        sets: dict[str | None, Frequencies],
        convention: Convention,
        layout: str,
        tables: str,
        apply: str,
        bits: Bits,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.sets = sets
        self.convention = convention
        self.layout = layout
        self.tables = tables
        self.apply = apply
        self.channels: Channels | None = None
        self.follows_x = True
        self.remembers_length = True  # whether dynamic NTK knows how long a sequence its frequencies are for
        self.applied_in_graphs = True  # whether what takes cos and sin in FP32 is where the parent's code is
        self.row_cache: RowCache | None = None
        self.shown: dict[str, Make] = {}  # tables that forward does not read
        self._rows: Rows | None = None
        self._ahead: dict[str | None, tuple[Any, int, Ahead | None]] = {}
        """For each set what was asked for last, the position that would be next, and what was made ahead."""
        self.lost: set[str] = set()
        self.dropped: set[str] = set()
        self._now: dict[str, Make] = {}
        self.settings: dict[str, Any] = {}
        """Numbers, names and switches that the stock forward reads of its module, as they were."""
        self.methods: dict[str, Any] = {}
        """Methods that it calls, as they were."""
        self.overruled: dict[str, torch.Tensor] = {}
        """What somebody has put into the module that no spec asks for; see `rewrite.keep_up`."""

    @classmethod
    def read(
        cls,
        module: nn.Module,
        patch: RopePatch | None,
        convention: Convention,
        *,
        tables: str,
        apply: str,
        true: Mapping[str, torch.Tensor],
        inv_freq: Bits = "checkpoint",
    ) -> RotaryState:
        """Read the state from a rotary module, changing nothing.

        Args:
            module: a module with a calling convention.
            patch: a patch that covers it.
            convention: its calling convention.
            tables: ``"exact"`` or ``"fp32"``.
            apply: ``"fp32"`` or ``"stock"``.
            true: what its tables should hold, by name, where that is known; inv_freq among them is
                authoritative.
            inv_freq: ``"checkpoint"`` or ``"exact"``, see `safe_rope.frequencies.RopeSpec.inv_freq`.

        Raises:
            ConfigError: the module's configuration contradicts itself.
            UnsupportedModelError: neither a config nor the usual attributes tell its frequencies.

        """
        # What stock FP32 gives on this CPU begins with the frequencies that it computes on this CPU.
        bits: Bits = "machine" if tables == "fp32" else inv_freq
        sets = read_sets(module, patch, true, tables, bits)
        layout = patch.layout if patch is not None else "half"
        state = cls(sets, convention, layout, tables, apply, bits)
        if convention == "length":
            state._grow_rows(module, cached_length(module))
        else:
            state._show_tables(module, true)
        read = reads_of(stock_class(module)).attributes | {"attention_scaling"}
        read -= {*_KEPT_BY_TABLES, *state._pins(module)}
        methods = {name for name in read if callable(getattr(stock_class(module), name, None))}
        state.settings = {name: setting(module, name) for name in read - methods}
        state.methods = {name: method(module, name) for name in methods}
        for name in state._pins(module):
            current = module._buffers.get(name, vars(module).get(name))
            if isinstance(current, torch.Tensor):
                state.nominal[name] = shadow_dtype(current) or current.dtype
        return state

    def of_another(self, module: Any) -> RotaryState:
        """Return the state of a ``module`` of the same class that was built from the same arguments."""
        state = copy.deepcopy(self)
        if state.row_cache is not None:
            module.max_seq_len_cached = state.row_cache.length
        return state

    # ------------------------------------------------------------------ cos and sin

    def step(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None
    ) -> tuple[CosSin, CosSin] | None:
        """Return cos and sin of one position on CPU, the same for all sequences, made ahead; or None.

        They are made once somebody asks for one position and then for the next.
        """
        if type(position_ids) is not torch.Tensor or not (position_ids.is_cpu and x.is_cpu):
            return None
        shape, dtype = position_ids.shape, position_ids.dtype
        if dtype != torch.int64 or shape[-1:] != (1,):
            return None
        frequencies = self.sets[layer_type]
        if frequencies.spec.depends_on_length:
            return None  # each position may have a table of its own
        position = int(position_ids.item()) if position_ids.numel() == 1 else _only(position_ids)
        if position is None:
            return None
        table = frequencies.table
        question = shape, x.dtype, table
        known, following, ahead = self._ahead.get(layer_type, (None, 0, None))
        if known == question:
            if ahead is not None and (found := ahead.row(position)) is not None:
                return found
            if 0 <= following - position <= 1 and position < _LAST_AHEAD:
                ahead = self._look_ahead(table, position, shape, x.dtype)
                self._ahead[layer_type] = question, position + ROWS, ahead
                return ahead.row(position)
        if self.apply == "fp32" and isinstance(table, RotaryTable) and len(shape) in (2, 3):
            self._ahead[layer_type] = question, position + 1, None
        return None

    def _look_ahead(self, table: Table, start: int, shape: torch.Size, dtype: torch.dtype) -> Ahead:
        with torch.inference_mode(False), torch.no_grad():
            positions = originals.arange(start, start + ROWS, dtype=torch.int64, device="cpu")
            cos, sin = table.lookup(positions.expand(*shape[:-2], 1, ROWS))
            several_axes = len(shape) == 3
            wide = self.widen(cos, several_axes), self.widen(sin, several_axes)
            return Ahead(start, *wide, shape[-2], dtype if self.follows_x else torch.float32)

    def lookup(
        self, module: nn.Module, position_ids: torch.Tensor, layer_type: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return FP32 cos and sin, each [*position_ids.shape, rotary_dim // 2]."""
        frequencies = self.sets[layer_type]
        spec = frequencies.spec
        if not spec.depends_on_length or position_ids.numel() == 0:
            return _fractions.lookup(frequencies.table, position_ids)
        length = position_ids.max() + 1
        if frequencies.long_table is None:
            self._follow_dynamic_ntk(module, layer_type, length)
            if frequencies.table is frequencies.original_table:
                return _fractions.lookup(frequencies.table, position_ids)
            # Frequencies of one step only: whole tables of them on the device would cost more than a copy.
            cos, sin = _fractions.lookup(frequencies.table, position_ids.cpu())
            return cos.to(position_ids.device), sin.to(position_ids.device)
        # The stock module reads its config here: it may say something else than when it was built.
        is_long = length > trained_length(module, layer_type, spec)
        if not torch.compiler.is_compiling():
            self._read_long_factors(module, layer_type)
        if is_watched() or position_ids.device.type != "cpu":
            # Asking which set applies would stop the device, and nobody can ask what is recorded or
            # transformed: both are looked up, one is chosen.
            long = _fractions.lookup(frequencies.long_table, position_ids)
            short = _fractions.lookup(frequencies.original_table, position_ids)
            return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])
        table = frequencies.long_table if is_long else frequencies.original_table
        if table is not frequencies.table:
            inv_freq = frequencies.long if is_long else frequencies.original
            self._show(module, frequencies, inv_freq, table)  # type: ignore[arg-type]
        return _fractions.lookup(frequencies.table, position_ids)

    def shows_what_it_used(self, device: torch.device) -> bool:
        """Whether ``inv_freq`` is what the last call came from: no device is asked which of two it was."""
        return device.type == "cpu" or all(one.long_table is None for one in self.sets.values())

    def rows(self, module: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables [at least length, rotary_dim] of a module that is called with a length."""
        if length > module.max_seq_len_cached:
            frequencies = self.sets[None]
            spec = frequencies.spec
            if spec.depends_on_length and length > (spec.max_position_embeddings or 0):
                self._set_inv_freq(module, frequencies, spec.inv_freq(length, self.bits))
            self._grow_rows(module, length)
        if self._rows is None or len(self._rows[0]) < length:
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

    def _read_long_factors(self, module: nn.Module, layer_type: str | None) -> None:
        """Take the long factors that the config has at the first forward, as the stock module does."""
        frequencies = self.sets[layer_type]
        if frequencies.is_asked:
            return
        frequencies.is_asked = True
        getattr(module.config, "standardize_rope_params", lambda: None)()  # the stock module has that done
        spec = spec_now(module, layer_type, frequencies.spec)
        if spec != frequencies.spec:
            frequencies.set_long(self.tables, module, spec, self.bits)

    def _follow_dynamic_ntk(self, module: Any, layer_type: str | None, length: torch.Tensor) -> None:
        frequencies = self.sets[layer_type]
        spec = frequencies.spec
        if not hasattr(module, "original_max_seq_len"):
            # Before transformers 4.43 there was no way back: the last long sequence's frequencies stayed.
            if length > (spec.max_position_embeddings or 0):
                self._set_inv_freq(module, frequencies, spec.inv_freq_below(length, self.bits))
            return
        # Grow with the longest sequence seen, come back once a sequence fits the trained length. transformers
        # 5.0 to 5.12 notes the length where it does not look: each one over the trained length counts as new.
        name = f"{frequencies.prefix}max_seq_len_cached"
        trained = module.original_max_seq_len
        cached = getattr(module, name, module.max_seq_len_cached)
        if length > cached:
            # The stock module reads its config here: it may say something else than when it was built.
            spec = frequencies.spec = spec_now(module, layer_type, spec)
            self._set_inv_freq(module, frequencies, spec.inv_freq_below(length, self.bits))
            if self.remembers_length:
                setattr(module, name, length.item())
        elif length < trained and cached > trained:
            first = get_table(module, f"{frequencies.prefix}original_inv_freq")
            if first is not None and not is_watched():
                # The stock module registers this very tensor: what is written to one of the two is in both.
                self.set(module, f"{frequencies.prefix}inv_freq", first)
            self._set_inv_freq(module, frequencies, frequencies.original)
            setattr(module, name, trained)

    def _set_inv_freq(self, module: nn.Module, frequencies: Frequencies, inv_freq: torch.Tensor) -> None:
        table = table_of(self.tables, module, frequencies.spec, inv_freq, self.bits)
        self._show(module, frequencies, inv_freq, table)

    def _show(
        self, module: nn.Module, frequencies: Frequencies, inv_freq: torch.Tensor, table: Table
    ) -> None:
        frequencies.inv_freq = inv_freq
        frequencies.table = table
        self._placed.pop(f"{frequencies.prefix}inv_freq", None)
        if not is_watched():
            self.restore(module)

    def _grow_rows(self, module: Any, length: int) -> None:
        frequencies = self.sets[None]
        self.row_cache, self._rows = shared_rows(frequencies.table, length, self.layout), None
        self._placed.pop("cos_cached", None)
        self._placed.pop("sin_cached", None)
        module.max_seq_len_cached = length

    def _show_tables(self, module: nn.Module, true: Mapping[str, torch.Tensor]) -> None:
        # transformers 4.38 computes from inv_freq, and keeps tables besides for whoever asks for them. Those
        # of its dynamic NTK are of positions divided by the factor, which nothing that it computes is.
        for name in position_buffers(module):
            values, frequencies = module._buffers.get(name), self.sets.get(None)
            if values is None or frequencies is None or name.endswith("inv_freq"):
                continue
            if values.dim() == 2 and values.shape[1] == 2 * frequencies.inv_freq.numel():
                cache = shared_rows(frequencies.original_table, len(values), self.layout)
                index, own = int(name.endswith("sin_cached")), true.get(name)
                is_other = own is not None and not _are_alike(own, cache.on(torch.device("cpu"))[index])
                self.shown[name] = (
                    _CopyOf(own) if is_other else functools.partial(_shown_rows, cache, index)  # type: ignore[arg-type]
                )

    # ------------------------------------------------------------------ the buffers that outside code reads

    def names(self, module: nn.Module) -> Iterable[str]:
        pins = self._pins(module)
        self._now = {n: pin for n, pin in pins.items() if n not in self.lost and n not in self.dropped}
        return self._now

    def make(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        values = self.overruled.get(name)
        if values is not None and values.numel():
            return values.to(device, copy=True)
        return self._now[name](device)

    def restore(self, module: nn.Module, device: torch.device | None = None) -> bool:
        replaced = any([method(module, name) is not value for name, value in self.methods.items()])
        if replaced or self.is_set_otherwise(module):
            self.overruled["settings"] = torch.empty(0)
        looked = super().restore(module, device)
        if looked and self.row_cache is not None:
            self._rows = self.row_cache.on(module._buffers["cos_cached"].device)  # type: ignore[union-attr]
        return looked

    def is_set_otherwise(self, module: nn.Module) -> bool:
        """Whether an attribute that the stock forward reads is another than when the module was protected."""
        return any([setting(module, name) != value for name, value in self.settings.items()])

    def is_learned(self, module: nn.Module) -> bool:
        """Whether a derivative may be taken by anything in the place of a table."""
        held = [*module._buffers.values(), *module._parameters.values(), *self.attributes.values()]
        return any([is_learned(one) for one in held])

    def stock(self, name: str) -> Iterable[torch.Tensor]:
        known: tuple[Bits, ...] = ("checkpoint", "machine")
        for frequencies in self.sets.values():
            own = name.removeprefix(frequencies.prefix)
            if own not in ("inv_freq", "original_inv_freq"):
                continue
            begins = own == "original_inv_freq" or frequencies.spec.depends_on_length
            true = frequencies.original if begins else frequencies.inv_freq
            formula = [frequencies.spec.inv_freq(bits=bits) for bits in known]
            # Over frequencies of somebody's own they are written for good.
            if any(torch.equal(true, values) for values in formula):
                yield from formula

    def adopt(self, module: nn.Module, name: str, values: torch.Tensor) -> None:
        self.adopted |= {name}
        for frequencies in self.sets.values():
            own = name.removeprefix(frequencies.prefix)
            if own not in ("inv_freq", "original_inv_freq"):
                continue
            if self._is_another_set(module, frequencies, values):
                inv_freq = values.detach().to("cpu", torch.float32, copy=True)
                if own == "inv_freq":
                    frequencies.inv_freq = inv_freq
                    frequencies.table = table_of(self.tables, module, frequencies.spec, inv_freq, self.bits)
                else:
                    frequencies.original = inv_freq
                self._now = self._pins(module)
                return
        self.overruled.pop(name, None)
        known = self.make(module, name, values.device)
        if known.dtype != values.dtype or not torch.equal(known, values):
            self.overruled[name] = values.detach().clone()

    def yield_to(self, module: nn.Module, name: str, learned: torch.Tensor) -> None:
        super().yield_to(module, name, learned)
        self.overruled["learned"] = learned

    def drop(self, module: nn.Module, name: str) -> None:
        if isinstance(getattr(module, name, None), torch.Tensor):  # a parameter, or a parametrization's
            self.dropped.add(name)
            self.overruled["learned"] = torch.empty(0)

    def lose(self, module: nn.Module, name: str) -> None:
        self.lost.add(name)
        self.overruled[name] = torch.empty(0)

    def _is_another_set(self, module: nn.Module, frequencies: Frequencies, values: torch.Tensor) -> bool:
        """Whether ``values`` can replace a set's frequencies, and nothing else changes with them."""
        return (
            self.convention == "positions"
            and not frequencies.spec.depends_on_length
            and not divides_positions(module, frequencies.spec)
            and not self.shown
            and values.shape == frequencies.inv_freq.shape
            and values.dtype == torch.float32
            and bool(values.isfinite().all())
        )

    def _pins(self, module: nn.Module) -> dict[str, Make]:
        pins: dict[str, Make] = {}
        for frequencies in self.sets.values():
            for name, values in (
                ("inv_freq", frequencies.inv_freq),
                ("original_inv_freq", frequencies.original),
            ):
                shown = frequencies.prefix + name
                if shown in module._buffers or hasattr(module, shown):  # to read one is to judge it
                    pins[shown] = _CopyOf(values)
        pins.update(self.shown)
        if self.row_cache is not None:
            for index, name in enumerate(("cos_cached", "sin_cached")):
                pins[name] = functools.partial(_shown_rows, self.row_cache, index)
        return pins

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryState:
        duplicate = copy.copy(self)
        duplicate.sets = {key: dataclasses.replace(value) for key, value in self.sets.items()}
        duplicate.nominal, duplicate.notes = dict(self.nominal), dict(self.notes)
        duplicate._placed, duplicate._ahead, duplicate.overruled = {}, {}, dict(self.overruled)
        duplicate.before = dict(self.before)
        duplicate.attributes = {}
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rows": None, "_now": {}, "_ahead": {}}


def _only(position_ids: torch.Tensor) -> int | None:
    """Return the one position that a few are, None where they differ or are many."""
    if not 0 < position_ids.numel() <= _LARGEST_STEP:
        return None
    first, *others = position_ids.reshape(-1).tolist()
    return first if all([other == first for other in others]) else None


def _shown_rows(cache: RowCache, index: int, device: torch.device) -> torch.Tensor:
    return cache.shown(device, index)


def _are_alike(own: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether two tables [positions, rotary_dim] are of the same phases: FP32 may round one of them more."""
    if own.shape != rows.shape:
        return True  # another length, of which this tells nothing
    positions = originals.arange(len(own), dtype=torch.int64, device="cpu").clamp(min=1)
    return bool(((own.float() - rows).abs() <= _ROUNDING * positions[:, None]).all())


@dataclasses.dataclass
class _CopyOf(Carried):
    """Makes copies of values: whoever writes into a buffer must not write into the truth."""

    values: torch.Tensor

    def __call__(self, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            return self.values.to(device, copy=True)
