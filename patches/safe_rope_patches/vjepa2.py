"""V-JEPA 2: every layer's attention computes its phases anew from positions, in the dtype of q."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="vjepa2",
    modules=("transformers.models.vjepa2.modeling_vjepa2",),
    rotary_classes=("VJEPA2RopeAttention",),
    layout="interleaved",
    applications=(),
    methods=("apply_rotary_embeddings",),
)
