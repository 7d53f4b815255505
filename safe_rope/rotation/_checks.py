"""What a rotation takes: `apply_rotary` raises what is wrong, a recognised body is then not used."""

from __future__ import annotations

import torch
from torch import Tensor

from safe_rope._base.dtypes import ROTATED
from safe_rope.rotation.kernels import Form


def fault_of_tables(cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> TypeError | ValueError | None:
    """Return an error unless cos and sin are FP32 tables of one shape."""
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor) or table.dtype != torch.float32:
            got = table.dtype if isinstance(table, Tensor) else type(table).__name__
            return TypeError(
                f"{name} must be a torch.float32 tensor, got {got}; take it from RotaryTable.lookup, uncast"
            )
        if table.requires_grad:
            return ValueError(f"{name} requires a gradient, which a table has none of; pass {name}.detach()")
    if cos.shape != sin.shape or cos.device != sin.device or cos.dim() == 0:
        return ValueError(
            "cos and sin must have the same shape [..., rotary_dim // 2] and device, got "
            f"{list(cos.shape)} on {cos.device} and {list(sin.shape)} on {sin.device}"
        )
    if not (-cos.dim() <= unsqueeze_dim + 1 < 0 or 0 <= unsqueeze_dim < cos.dim()):  # columns stay the last
        return ValueError(
            f"unsqueeze_dim must be in 0 .. {cos.dim() - 1}, or -2 and less, for tables of shape "
            f"{list(cos.shape)}, got {unsqueeze_dim}; 1 is for [batch, heads, length, head_dim]"
        )
    return None


def fault_of_states(name: str, x: Tensor, cos: Tensor, form: Form) -> TypeError | ValueError | None:
    """Return an error unless ``x`` (q or k) can be rotated with the unsqueezed tables."""
    if not isinstance(x, Tensor) or x.dtype not in ROTATED:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        return TypeError(f"{name} must be a torch.bfloat16, float16 or float32 tensor, got {got}")
    rotary_dim = form.rotary_dim(cos.shape[-1])
    if x.dim() != cos.dim() or any(
        n not in (1, m) for n, m in zip(cos.shape[:-1], x.shape[:-1], strict=True)
    ):
        return ValueError(
            f"cos and sin, unsqueezed to {list(cos.shape)}, do not fit {name} of shape {list(x.shape)}: "
            f"every dimension but the last must be 1 or {name}'s; look at unsqueeze_dim"
        )
    if rotary_dim > x.shape[-1] or rotary_dim % 2:
        return ValueError(
            f"cos and sin rotate {rotary_dim} elements of each head, but {name} has {x.shape[-1]}; pass "
            "tables of [..., rotary_dim // 2] as RotaryTable.lookup returns them"
        )
    if x.device != cos.device:
        return ValueError(f"{name} is on {x.device}, cos and sin on {cos.device}; move them to one device")
    return None
