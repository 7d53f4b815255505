"""GPT-J and CodeGen: every layer holds a table with sin and cos side by side, and rotates by its rows."""

from __future__ import annotations

from safe_rope.registry import RopePatch

PATCH = RopePatch(
    family="gptj",
    modules=("transformers.models.gptj.modeling_gptj", "transformers.models.codegen.modeling_codegen"),
    rotary_classes=("GPTJAttention", "GPTJFlashAttention2", "CodeGenAttention"),
    layout="interleaved",
)
