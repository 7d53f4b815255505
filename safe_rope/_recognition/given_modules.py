"""What stands for the modules that a constructor is given, when it runs again: it may change them.

peft's constructors put adapters into the model that they get, and others tie weights or move layers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from safe_rope._base.torch_private import pytree

_REAL = 1 << 20
"""Elements of a tensor whose values a constructor may want to see."""


def without_modules(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return a call's arguments with copies of their modules and parameters, large ones without values.

    Raises:
        Exception: whatever a module raises that cannot be copied.

    """
    leaves = pytree.tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    memo: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter):
            _alike(leaf, memo)
    if not (given or memo):
        return args, kwargs
    for module in given:
        for part in module.modules():
            # ZeRO-3 of DeepSpeed 0.14 has put dictionaries there that cannot be copied.
            memo.setdefault(id(part._parameters), {n: _alike(p, memo) for n, p in part._parameters.items()})
            for buffer in part._buffers.values():
                _alike(buffer, memo)
    return pytree.tree_map(lambda leaf: _copied(leaf, memo), (args, kwargs))  # type: ignore[no-any-return]


def _copied(leaf: Any, memo: dict[int, Any]) -> Any:
    return copy.deepcopy(leaf, memo) if isinstance(leaf, (nn.Module, nn.Parameter)) else leaf


def _alike(tensor: torch.Tensor | None, memo: dict[int, Any]) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in memo:
        memo[id(tensor)] = _like(tensor)
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    shape = getattr(tensor, "ds_shape", tensor.shape)
    is_real = (
        type(tensor) in (torch.Tensor, nn.Parameter) and shape == tensor.shape and tensor.numel() <= _REAL
    )
    with torch.no_grad():
        values = tensor.detach().clone() if is_real else torch.empty(shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values
