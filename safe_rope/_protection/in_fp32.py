"""FP32 application for modules that keep their own computation: cos and sin are not rounded on their way.

A pinned module (`safe_rope._protection.pinned`) computes as its authors wrote it. Where what it returns, or
a table that it holds, is cos and sin for an application function that is FP32-aware (`safe_rope.rotation`),
rounding to the activations' dtype is left to that function. A module that is itself the application is run
like one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from safe_rope._base.dtypes import LOW
from safe_rope.rotation import CosSin, marked, round_results, without_autocast

_map = torch.utils._pytree.tree_map_only


def run_in_fp32(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, rotates: bool
) -> Any:
    """Run the stock ``forward``, which lowers what it returns to its input's dtype, on inputs in FP32.

    Args:
        module: a module whose frequencies are in FP32.
        forward: the stock forward.
        args: its arguments.
        kwargs: its keyword arguments.
        rotates: whether it returns q and k rotated, rather than cos and sin.

    Returns:
        what ``forward`` returns: q and k rounded to the dtypes that they came in, cos and sin in FP32 and
        marked for the application function.

    """
    states = [leaf for leaf in _tensors((args, kwargs)) if leaf.is_floating_point()]
    dtypes = [leaf.dtype for leaf in states]
    args, kwargs = raise_arguments(args, kwargs)
    with without_autocast(states[0].device.type if states else "cpu"):
        result = forward(module, *args, **kwargs)
    if rotates:
        return round_results(result, dtypes)
    if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
        return CosSin(result)  # in a graph, too: phases have to go through cos and sin first
    return _map(torch.Tensor, lambda leaf: marked(leaf) if leaf.dtype == torch.float32 else leaf, result)


def raise_arguments(args: Any, kwargs: Any) -> Any:
    """Return args and kwargs with every tensor of low precision in FP32."""
    return _map(torch.Tensor, _raised, (args, kwargs))


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
