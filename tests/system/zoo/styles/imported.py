"""Own attention around the rotary classes of transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair
from styles.owners import HEAD_DIM, HEADS, Attention, swap_halves
from styles.registry import DIM, style

try:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
except ImportError:
    LlamaRotaryEmbedding = None


if LlamaRotaryEmbedding is not None:
    TAKES_A_CONFIG = "config" in inspect.signature(LlamaRotaryEmbedding.__init__).parameters

    def arguments() -> tuple[Any, ...]:
        """What the installed release wants to know: a config, or, before 4.43, the dimension."""
        if not TAKES_A_CONFIG:
            return (HEAD_DIM,)
        return (LlamaConfig(hidden_size=DIM, num_attention_heads=HEADS, max_position_embeddings=1024),)

    def rows(rope: nn.Module, x: torch.Tensor) -> Pair:
        """Ask for cos and sin of every position, [length, head_dim]."""
        n = x.shape[2]
        if "seq_len" in inspect.signature(rope.forward).parameters:
            cos, sin = rope(x, seq_len=n)
            return cos, sin
        cos, sin = rope(x, torch.arange(n)[None])
        return cos[0], sin[0]

    @style("imported", "attention", shows="output", inv_freq="rotary_emb.inv_freq")
    class LlamaRotaryImported(Attention):
        """Takes Llama's tables and turns q and k itself."""

        def __init__(self) -> None:
            super().__init__()
            self.rotary_emb = LlamaRotaryEmbedding(*arguments())

        def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            cos, sin = rows(self.rotary_emb, x)
            return x * cos + swap_halves(x) * sin

    class OwnLlamaRotary(LlamaRotaryEmbedding):
        """Llama's tables, and a method to turn by them."""

        def turn(self, x: torch.Tensor) -> torch.Tensor:
            cos, sin = rows(self, x)
            return x * cos + swap_halves(x) * sin

    @style("imported", "subclass", shows="output", inv_freq="rotary_emb.inv_freq")
    class LlamaRotarySubclassed(Attention):
        """Its rope is a subclass of Llama's."""

        def __init__(self) -> None:
            super().__init__()
            self.rotary_emb = OwnLlamaRotary(*arguments())

        def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return self.rotary_emb.turn(x)

    class HalvedLlamaRotary(LlamaRotaryEmbedding):
        """Interpolates after Llama's constructor."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.inv_freq = self.inv_freq / 2

    @style("imported", "subclass", "scaling", shows="output", inv_freq="rotary_emb.inv_freq")
    class LlamaRotaryInterpolated(Attention):
        """Its rope divides the frequencies once more; the tables of older releases are made before."""

        def __init__(self) -> None:
            super().__init__()
            self.rotary_emb = HalvedLlamaRotary(*arguments())

        def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            cos, sin = rows(self.rotary_emb, x)
            return x * cos.to(x.dtype) + swap_halves(x) * sin.to(x.dtype)
