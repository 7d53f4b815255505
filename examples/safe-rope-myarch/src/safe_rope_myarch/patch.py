"""What safe_rope has to know about the model: data, no code."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="myarch",
    modules=("safe_rope_myarch.modeling_myarch",),
    rotary_classes=("MyRotaryEmbedding",),
    layout="half",
    applications=("apply_rotary_pos_emb",),
)
