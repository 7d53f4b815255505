"""What each operator of torch does to a table of cos and sin: moves it, shows a part of it, writes to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from safe_rope._base.torch_private import is_composite

_aten = torch.ops.aten

_VIEWS = frozenset(
    {
        _aten._unsafe_view,
        _aten.alias,
        _aten.as_strided,
        _aten.detach,
        _aten.expand,
        _aten.permute,
        _aten.select,
        _aten.slice,
        _aten.split,
        _aten.split_with_sizes,
        _aten.squeeze,
        _aten.t,
        _aten.transpose,
        _aten.unbind,
        _aten.unsqueeze,
        _aten.view,
    }
)
# Those whose result comes from their first argument alone; any other tensor that they take is an index.
_MOVE = _VIEWS | {_aten.clone, _aten.gather, _aten.index, _aten.index_select, _aten.repeat}
# What only moves or rearranges values keeps the mark, and so do cos and sin of marked phases. Of a table
# whose nominal dtype is not known, other arithmetic gives plain tensors.
_KEEP_THE_MARK = _MOVE | {_aten._to_copy, _aten.cat, _aten.cos, _aten.sin, _aten.stack}
_ENDS_A_PHASE = frozenset({_aten.cos, _aten.sin, _aten.polar, _aten.exp, _aten.log, _aten.tanh})


class Kind(NamedTuple):
    """What an operator does to a table."""

    operator: Any
    function: Any
    composite: bool
    moves: bool
    views: bool
    repeats: bool
    converts: bool
    writes: bool
    aliases: bool
    keeps_the_mark: bool
    ends_a_phase: bool


_FUNCTIONS = {_aten.gather.default: torch.gather}
"""Functions that do what an operator does, without a look at its schema."""
_kinds: dict[int, Kind] = {}


def kind_of(func: Any) -> Kind:
    """Return what is known of an operator; its schema is read once."""
    known = _kinds.get(id(func))  # operators hash slowly; the entry keeps them alive
    if known is None:
        packet = func.overloadpacket
        known = _kinds[id(func)] = Kind(
            func,
            _FUNCTIONS.get(func, func),
            is_composite(func),
            packet in _MOVE,
            packet in _VIEWS,
            packet is _aten.repeat,
            packet is _aten._to_copy,
            func._schema.is_mutable,
            any(result.alias_info is not None for result in func._schema.returns),
            packet in _KEEP_THE_MARK,
            packet in _ENDS_A_PHASE,
        )
    return known
