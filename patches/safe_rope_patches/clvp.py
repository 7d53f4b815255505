"""CLVP: one module returns the phases, and every attention takes their cos and sin, for q, k and v."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="clvp",
    modules=("transformers.models.clvp.modeling_clvp",),
    rotary_classes=("ClvpRotaryPositionalEmbedding",),
    layout="half",
)
