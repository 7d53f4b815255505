"""Mistral: Llama's embedding in classes of its own."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="mistral",
    modules=("transformers.models.mistral.modeling_mistral",),
    rotary_classes=("MistralRotaryEmbedding",),
    layout="half",
)
