"""The frequencies of a protected rotary module: one set, or one for each layer type, each with its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from safe_rope._base.carried import Carried
from safe_rope._recognition.specs import divides_positions, layer_types, read_spec, shown_spec
from safe_rope.errors import SafeRopeError
from safe_rope.frequencies import Bits, RopeSpec
from safe_rope.registry import RopePatch, find
from safe_rope.tables import RotaryTable, StockTable, shared_table

Table = RotaryTable | StockTable


@dataclasses.dataclass
class Frequencies(Carried):
    """One set of frequencies of a module, and the table that belongs to it.

    ``inv_freq`` is what the buffer of that name shows, ``table`` what cos and sin come from. They differ only
    for linear scaling of old classes, Llama's before transformers 4.43: it divides the position instead.
    """

    spec: RopeSpec
    prefix: str
    original: torch.Tensor
    inv_freq: torch.Tensor
    table: Table
    original_table: Table
    long: torch.Tensor | None = None
    long_table: Table | None = None
    is_asked: bool = False
    """Whether cos and sin have been looked up: longrope reads its long factors in the first forward."""

    def set_long(self, tables: str, module: nn.Module, spec: RopeSpec, bits: Bits) -> None:
        """Take the long factors of ``spec``; what cos and sin are multiplied by stays."""
        self.long = spec.inv_freq((spec.original_max_position_embeddings or 0) + 1, bits)
        self.long_table = table_of(tables, module, self.spec, self.long, bits)


def read_sets(
    module: nn.Module, patch: RopePatch | None, true: Mapping[str, torch.Tensor], tables: str, bits: Bits
) -> dict[str | None, Frequencies]:
    """Read the sets of a module by layer type, None for the one of all layers; see `RotaryState.read`."""
    sets: dict[str | None, Frequencies] = {}
    for layer_type in layer_types(module):
        spec = read_spec(module, patch, layer_type)
        prefix = "" if layer_type is None else f"{layer_type}_"
        shown = shown_spec(module, spec)
        expected = shown.inv_freq(bits=bits)
        inv_freq = _authoritative(true.get(f"{prefix}inv_freq"), shown, expected)
        first = true.get(f"{prefix}original_inv_freq")
        original = inv_freq if first is None else _authoritative(first, shown, expected)
        table = table_of(tables, module, spec, inv_freq, bits)
        sets[layer_type] = Frequencies(spec, prefix, original, inv_freq, table, table)
        if spec.rope_type == "longrope":
            sets[layer_type].set_long(tables, module, spec, bits)
    return sets


def spec_now(module: nn.Module, layer_type: str | None, spec: RopeSpec) -> RopeSpec:
    """Return what a module's config asks for now; ``spec`` where that is no other of its kind."""
    try:
        now = read_spec(module, find(module), layer_type)
    except SafeRopeError:
        return spec
    if spec.rope_type == "dynamic" and now.factor is not None:
        now = dataclasses.replace(now, rope_type=spec.rope_type)  # the module keeps its own rule
    return now if (now.rope_type, now.rotary_dim) == (spec.rope_type, spec.rotary_dim) else spec


def table_of(kind: str, module: nn.Module, spec: RopeSpec, inv_freq: torch.Tensor, bits: Bits) -> Table:
    """Return the table of these frequencies, of the kind "exact" or "fp32"."""
    divisor = 1.0
    if divides_positions(module, spec):
        if kind == "fp32":
            divisor = spec.factor or 1.0
        else:
            inv_freq = spec.inv_freq(bits=bits)
    table: Table = shared_table(kind, inv_freq, spec.attention_scaling, divisor)  # type: ignore[arg-type]
    return table


def _authoritative(true: torch.Tensor | None, spec: RopeSpec, expected: torch.Tensor) -> torch.Tensor:
    """Return the true inv_freq; ``expected``, whose bits no CPU changes, where the two are the same.

    Args:
        true: what the module should hold, where that is known.
        spec: what its config says.
        expected: the frequencies of that spec.

    """
    if true is None or true.shape != expected.shape or true.dtype != torch.float32:
        return expected
    if torch.equal(true, expected) or torch.equal(true, spec.inv_freq(bits="machine")):
        return expected
    return true.detach().clone()
