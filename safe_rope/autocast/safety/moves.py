"""Which operators only move values, which look at shapes only, and which write to what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Operator = Any
"""A `torch._ops.OpOverload`, which torch does not export."""

# Each element of the result is an element of an argument or a constant, so that rounding the argument first
# and rounding the result are the same thing. Views are not listed: their schemas tell.
_MOVES = frozenset(
    (
        "_reshape_copy",
        "_to_copy",
        "_unsafe_index",
        "_unsafe_view",
        "_pin_memory",
        "alias_copy",
        "as_strided_copy",
        "as_strided_scatter",
        "block_diag",
        "cat",
        "channel_shuffle",
        "clone",
        "constant_pad_nd",
        "copy",
        "copy_",
        "detach_copy",
        "diag_embed",
        "diagonal_copy",
        "diagonal_scatter",
        "embedding",
        "expand_copy",
        "flip",
        "gather",
        "im2col",
        "index",
        "index_copy",
        "index_copy_",
        "index_put",
        "index_put_",
        "index_select",
        "lift",
        "lift_fresh_copy",
        "masked_fill",
        "masked_fill_",
        "masked_scatter",
        "masked_scatter_",
        "masked_select",
        "permute_copy",
        "pixel_shuffle",
        "pixel_unshuffle",
        "repeat",
        "repeat_interleave",
        "roll",
        "rot90",
        "scatter",
        "scatter_",
        "select_copy",
        "select_scatter",
        "slice_copy",
        "slice_scatter",
        "split_copy",
        "split_with_sizes_copy",
        "squeeze_copy",
        "stack",
        "t_copy",
        "take",
        "transpose_copy",
        "tril",
        "triu",
        "unbind_copy",
        "unfold_copy",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsqueeze_copy",
        "view_copy",
        "where",
    )
)
_ACCUMULATING = frozenset({"index_put", "index_put_"})  # with accumulate=True; scatter's sums have overloads
_SHAPES = frozenset(
    (
        "_assert_tensor_metadata",
        "empty_like",
        "full_like",
        "is_same_size",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "record_stream",
        "result_type",
        "sym_is_contiguous",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
        "zeros_like",
    )
)
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


def packet(operator: Operator) -> str:
    """Return the operator's name without its overload: ``embedding``."""
    return str(operator._schema.name).rpartition("::")[2]


def qualified(operator: Operator) -> str:
    """Return the operator's name as messages show it: ``aten.embedding``."""
    return str(operator._schema.name).replace("::", ".")


def is_view(operator: Operator) -> bool:
    """Whether the results share the storage of an argument and nothing is written."""
    returned = [result.alias_info for result in operator._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def reads_shapes_only(operator: Operator) -> bool:
    """Whether the result does not depend on any value."""
    return operator.namespace == "prim" or (_is_aten(operator) and packet(operator) in _SHAPES)


def overwrites(operator: Operator) -> bool:
    """Whether the first argument is written to and not read."""
    return _is_aten(operator) and packet(operator) in _OVERWRITES


def moves_only(operator: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether every element of the result is an element of an argument, up to an exact change of dtype."""
    name = packet(operator)
    if not _is_aten(operator) or name not in _MOVES:
        return False
    if name in _ACCUMULATING and ((len(arguments) > 3 and arguments[3]) or keywords.get("accumulate")):
        return False
    if name in ("scatter", "scatter_"):
        return str(operator._schema.overload_name) in ("src", "value")
    return True


def _is_aten(operator: Operator) -> bool:
    return str(operator._schema.name).startswith("aten::")


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments or in a model's output, however deeply they lie."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry)
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from tensors(entry)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors(vars(value))


def written(operator: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that the operator writes to, by its schema."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if index < len(arguments) and not argument.kwarg_only:
                yield from tensors(arguments[index])
            elif argument.name in keywords:
                yield from tensors(keywords[argument.name])


def holds_exactly(wider: torch.dtype, narrower: torch.dtype) -> bool:
    """Whether every value of the floating dtype ``narrower`` is one of ``wider``."""
    return wider == narrower or (wider.is_floating_point and torch.promote_types(wider, narrower) == wider)
