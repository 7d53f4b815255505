"""Phi-MoE before transformers 5: a module without tables, which makes cos and sin anew in every forward."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="phimoe",
    modules=("transformers.models.phimoe.modeling_phimoe",),
    rotary_classes=("PhimoeRotaryEmbedding",),
    layout="half",
)
