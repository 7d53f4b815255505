"""Conformer encoders of speech: cos and sin in one tensor, and a method that rotates the hidden states."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="conformer",
    modules=(
        "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer",
        "transformers.models.wav2vec2_bert.modeling_wav2vec2_bert",
        "transformers.models.seamless_m4t.modeling_seamless_m4t",
    ),
    rotary_classes=(
        "Wav2Vec2ConformerRotaryPositionalEmbedding",
        "Wav2Vec2BertRotaryPositionalEmbedding",
        "SeamlessM4TConformerRotaryPositionalEmbedding",
    ),
    layout="half",
    applications=(
        "Wav2Vec2ConformerSelfAttention._apply_rotary_embedding",
        "Wav2Vec2BertSelfAttention._apply_rotary_embedding",
        "SeamlessM4TConformerSelfAttention._apply_rotary_embedding",
    ),
)
