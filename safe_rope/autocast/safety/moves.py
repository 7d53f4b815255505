"""Which operators only move values, which look at shapes only, and which write to what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from safe_rope._base.tensors import tensors
from safe_rope.autocast._operators import Operator, named_arguments, packet

# Each element of the result is an element of an argument or a constant, so that rounding the argument first
# and rounding the result are the same thing. Neither views nor their copies are listed: torch tells.
_MOVES = frozenset(
    " ".join(
        (
            "clone copy copy_ lift _to_copy _pin_memory _reshape_copy _unsafe_view",  # the same elements
            "flip roll rot90 channel_shuffle pixel_shuffle pixel_unshuffle",  # in another order
            "embedding gather index _unsafe_index index_select masked_select take im2col",  # some of them
            "unsafe_chunk unsafe_split unsafe_split_with_sizes",
            "repeat repeat_interleave",
            "cat stack where block_diag constant_pad_nd diag_embed tril triu",  # beside others, or constants
            "masked_fill masked_fill_ masked_scatter masked_scatter_",  # written into others
            "index_copy index_copy_ index_put index_put_",
            "scatter scatter_ as_strided_scatter diagonal_scatter select_scatter slice_scatter",
        )
    ).split()
)
_ACCUMULATING = frozenset({"index_put", "index_put_"})  # with accumulate=True; scatter's sums have overloads
_SHAPES = frozenset(
    " ".join(
        (
            "empty_like full_like ones_like zeros_like rand_like randint_like randn_like",
            "new_empty new_empty_strided new_full new_ones new_zeros",
            "sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride",
            "_assert_tensor_metadata is_same_size record_stream result_type",
        )
    ).split()
)
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


def is_view(operator: Operator) -> bool:
    """Whether the results share the storage of an argument and nothing is written."""
    returned = [result.alias_info for result in operator._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def reads_shapes_only(operator: Operator) -> bool:
    """Whether the result does not depend on any value."""
    return operator.namespace == "prim" or _is_aten(operator, _SHAPES)


def lifts(operator: Operator) -> bool:
    """Whether the argument is a tensor that was just made of Python's numbers."""
    return _is_aten(operator, frozenset({"lift", "lift_fresh", "lift_fresh_copy"}))


def overwrites(operator: Operator) -> bool:
    """Whether the first argument is written to and not read."""
    return _is_aten(operator, _OVERWRITES)


def moves_only(operator: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether every element of the result is an element of an argument, up to an exact change of dtype."""
    if torch.Tag.view_copy in operator.tags:
        return True
    if not _is_aten(operator, _MOVES):
        return False
    name = packet(operator)
    if name in _ACCUMULATING and ((len(arguments) > 3 and arguments[3]) or keywords.get("accumulate")):
        return False
    if name in ("scatter", "scatter_"):
        return str(operator._schema.overload_name) in ("src", "value")
    return True


def _is_aten(operator: Operator, names: frozenset[str]) -> bool:
    return str(operator._schema.name).startswith("aten::") and packet(operator) in names


def written(operator: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that the operator writes to, by its schema."""
    for argument, value in named_arguments(operator, arguments, keywords):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(value)


def holds_exactly(wider: torch.dtype, narrower: torch.dtype) -> bool:
    """Whether every value of the floating dtype ``narrower`` is one of ``wider``."""
    return wider == narrower or (wider.is_floating_point and torch.promote_types(wider, narrower) == wider)
