"""torchtune: a module that takes q or k and returns it rotated, by a cache of cos and sin."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="torchtune",
    modules=(
        "torchtune.modules.position_embeddings",
        "torchtune.models.llama3_1._position_embeddings",
        "torchtune.models.phi3._position_embeddings",
        "torchtune.models.qwen2._positional_embeddings",
    ),
    rotary_classes=(
        "RotaryPositionalEmbeddings",
        "VisionRotaryPositionalEmbeddings",
        "Llama3ScaledRoPE",
        "Phi3RotaryPositionalEmbeddings",
        "Qwen2RotaryPositionalEmbeddings",
    ),
    layout="interleaved",
    applications=(),
    methods=("forward",),
)
