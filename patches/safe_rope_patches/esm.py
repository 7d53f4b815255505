"""ESM before transformers 5: a rotary module in every layer that takes q and k and returns them rotated."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="esm",
    modules=("transformers.models.esm.modeling_esm",),
    rotary_classes=("RotaryEmbedding",),
    layout="half",
    applications=(),
    methods=("forward",),
)
