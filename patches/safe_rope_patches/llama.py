"""Llama: one rotary module a layer until transformers 4.4x (three classes), one a model since."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="llama",
    modules=("transformers.models.llama.modeling_llama",),
    rotary_classes=(
        "LlamaRotaryEmbedding",
        "LlamaLinearScalingRotaryEmbedding",
        "LlamaDynamicNTKScalingRotaryEmbedding",
    ),
    layout="half",
)
