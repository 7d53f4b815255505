"""rotary-embedding-torch: frequencies in a frozen parameter, positions and a cache in the dtype of q."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_rope.registry import RopePatch

if TYPE_CHECKING:
    from torch import nn


def adjust(module: nn.Module) -> None:
    """Make a buffer of the frequencies, unless they are learned, and compute phases anew each time."""
    module.cache_if_possible = False  # type: ignore[assignment]
    frequencies = module._parameters.get("freqs")
    if frequencies is not None and not frequencies.requires_grad:
        del module._parameters["freqs"]
        module.register_buffer("freqs", frequencies.detach())


PATCH = RopePatch(
    family="rotary-embedding-torch",
    modules=("rotary_embedding_torch.rotary_embedding_torch",),
    rotary_classes=("RotaryEmbedding",),
    layout="interleaved",
    applications=(),
    methods=(
        "rotate_queries_or_keys",
        "rotate_queries_and_keys",
        "rotate_queries_with_cached_keys",
    ),
    adjust=adjust,
)
