"""Hints for the architectures that cannot be protected without: one `RopePatch` a file."""

from __future__ import annotations

from safe_rope_patches import (
    clvp,
    conformer,
    esm,
    gpt_neox,
    gptj,
    llama,
    mistral,
    phimoe,
    rotary_embedding_torch,
    torchtune,
    vjepa2,
)

_FILES = (
    clvp,
    conformer,
    esm,
    gpt_neox,
    gptj,
    llama,
    mistral,
    phimoe,
    rotary_embedding_torch,
    torchtune,
    vjepa2,
)

PATCHES = tuple(file.PATCH for file in _FILES)
"""What the entry point of safe_rope in the group ``safe_rope.patches`` names."""
