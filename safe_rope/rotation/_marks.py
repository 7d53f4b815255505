"""How cos and sin are marked on their way: as `CosSin`, by an attribute in an export, or by their dtype.

A table of an export, or of what torch.jit.trace or make_fx records, has the dtype of the stock model; its
attribute holds the exact one.
"""

from __future__ import annotations

from typing import Any

import torch

from safe_rope._base import torch_private
from safe_rope._base.torch_private import constant_in_graphs, graphs_take_attributes, has_tangent
from safe_rope.rotation._cos_sin import CosSin

_MARK = "_safe_rope_cos_sin"


def marked(tensor: torch.Tensor, nominal: torch.dtype | None = None) -> torch.Tensor:
    """Return ``tensor`` (FP32 cos or sin) as `CosSin`, a view of the same memory, or as an export has it.

    ``nominal``: the dtype that the stock model's table has here.
    """
    if is_dtype_the_mark():
        return tensor
    in_graph = torch.compiler.is_dynamo_compiling()  # where nothing is wrapped
    if nominal is not None and not in_graph and torch_private.is_wrapped(tensor):
        return tensor.to(nominal)  # what a transform wraps cannot be computed with below it, where marks are
    if nominal is not None and not in_graph and has_tangent(tensor):
        return tensor.to(nominal)
    # Each call of a rotary module asks: counting calls no function of Python.
    is_recorded = not in_graph and (
        torch_private.tracing_state() is not None
        or (torch_private.count_dispatch_modes() > 0 and torch_private.is_recorded_by_a_mode())
    )
    if is_recorded or _is_exported():
        # The graph is the whole model, of plain tensors; a trace has a `CosSin` as a constant. No operator
        # hands an attribute on: who takes a part of a table, or multiplies by it, has what stock has.
        if nominal is not None and nominal != tensor.dtype:
            shown, table = tensor.to(nominal), tensor
        else:
            # Dynamo sets no attribute of what came in a tuple, as from torch.split.
            shown, table = (tensor[...] if in_graph else tensor), None
        setattr(shown, _MARK, table)
        return shown
    # In a graph of Dynamo, too: it may end here, and of what is made from an output only the type is kept.
    return CosSin(tensor, nominal, faced=True)


@constant_in_graphs
def _is_exported() -> bool:
    # Asked outside of the graph: Dynamo before torch 2.13 takes each of its graphs for an exported one.
    return torch_private.is_exporting()


def is_dtype_the_mark() -> bool:
    """Whether a Dynamo that refuses attributes traces this: there FP32 beside lower dtypes is a table."""
    return torch.compiler.is_dynamo_compiling() and not graphs_take_attributes()


def is_marked(value: Any) -> bool:
    """Whether ``value`` is a table that a protected module returned."""
    if isinstance(value, CosSin) or not isinstance(value, torch.Tensor):
        return isinstance(value, CosSin)
    return not is_dtype_the_mark() and hasattr(value, _MARK)


def exact(value: Any) -> Any:
    """Return the exact table of one that an export has; anything else as it is."""
    if isinstance(value, CosSin) or not is_marked(value):
        return value
    table = getattr(value, _MARK)
    return value if table is None else table
