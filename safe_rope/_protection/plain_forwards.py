"""Whether a rotary forward computes of positions and tables alone: only then our tables take its place.

What transformers defines itself is known by comparing whole models with stock ones.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

from safe_rope._base import methods
from safe_rope._base.forwards import A_TENSOR, functions_of, setting
from safe_rope._recognition.specs import position_buffers
from safe_rope.rotation._plain_code import TRUSTED, is_plain

_KNOWN = {
    *("cos", "sin", "outer", "matmul", "bmm", "mm", "arange", "pow", "float32", "int64", "half", "bfloat16"),
    *("autocast", "amp", "type", "no_grad", "get_default_dtype", "register_buffer", "attention_scaling"),
}


def computes_alone(module: nn.Module, cls: Any) -> bool:
    """Whether the forward of ``cls``, the stock class of a module, does nothing else."""
    if not all(_is_its_own(vars(base).get("forward")) for base in cls.__mro__ if base is not nn.Module):
        return False
    own = [one for one in functions_of(cls) if not str(one.__module__).startswith(TRUSTED)]
    if not own:
        return True
    watched = [n for n in (*vars(module), *vars(cls)) if setting(module, n) not in (None, A_TENSOR)]
    known = {*_KNOWN, *position_buffers(module), *methods.methods_by_name(cls), *watched}
    known |= {"max_seq_len_cached", "max_position_embeddings", "forward"}
    return all(is_plain(one, known) for one in own)


def _is_its_own(forward: Any) -> bool:
    """Whether nothing is wrapped around a forward but what torch and transformers have for that."""
    while hasattr(forward, "__wrapped__"):
        place = getattr(forward, "__globals__", {}).get("__name__", "")
        if not place.startswith(("torch.", "transformers.")):
            return False
        forward = forward.__wrapped__
    return forward is None or type(forward) is types.FunctionType
