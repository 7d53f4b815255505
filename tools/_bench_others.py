"""Other libraries' rotations, where they are installed; what is left out is said on stderr."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def others(inputs: Any) -> dict[str, Rotate]:
    """Return the rotations that can run here, by name."""
    found: dict[str, Rotate] = {}
    for name, needs_gpu, make in (
        ("Liger-Kernel", True, _liger),
        ("flash-attn", True, _flash_attention),
        ("torchtune", False, _torchtune),
    ):
        if needs_gpu and inputs.device != "cuda":
            print(f"left out: {name} needs a GPU", file=sys.stderr)
            continue
        try:
            found[name] = make(inputs)
        except ImportError as error:
            print(f"left out: {name} is not installed ({error})", file=sys.stderr)
    return found


def _liger(inputs: Any) -> Rotate:
    rotate = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    # It writes into q and k, whose length stays what it is: they serve again.
    return lambda q, k: rotate(q, k, *inputs.wide)


def _flash_attention(inputs: Any) -> Rotate:
    rotate = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb
    cos, sin = inputs.cos[0], inputs.sin[0]

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        # It takes [batch, length, heads, head_dim].
        return tuple(rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))

    return run


def _torchtune(inputs: Any) -> Rotate:
    embedding = importlib.import_module("torchtune.modules").RotaryPositionalEmbeddings
    rotary = embedding(inputs.shape.head_dim, inputs.shape.length, base=500000).to(inputs.device)

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        # It takes [batch, length, heads, head_dim], and pairs neighbours.
        return tuple(rotary(x.transpose(1, 2)).transpose(1, 2) for x in (q, k))

    return run
