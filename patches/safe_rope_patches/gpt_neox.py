"""GPT-NeoX and Pythia: the first ``rotary_pct`` of each head is rotated, the rest passes through."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="gpt_neox",
    modules=("transformers.models.gpt_neox.modeling_gpt_neox",),
    rotary_classes=(
        "GPTNeoXRotaryEmbedding",
        "GPTNeoXLinearScalingRotaryEmbedding",
        "GPTNeoXDynamicNTKScalingRotaryEmbedding",
    ),
    layout="half",
)
