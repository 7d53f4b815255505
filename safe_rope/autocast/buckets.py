"""The size of the staging buffers in which gradients wait for their reduction."""

from __future__ import annotations

import torch

from safe_rope.autocast.settings import AutocastSettings

_FP32_BYTES = 4


def bucket_size(settings: AutocastSettings, dtypes: set[torch.dtype]) -> int:
    """Return the reduce_bucket_size, in elements, that costs no more memory than FP32 would.

    ZeRO keeps one buffer for each dtype of reduction: ZeRO 1 and 2 in FP32 whatever the dtype, ZeRO 3 in
    the dtype itself. One buffer of the size that the user asked for takes 4 bytes for each element, and
    this is what all of them get together (twice that where overlap_comm doubles them).

    Args:
        settings: with the size that the user asked for.
        dtypes: those in which gradients are reduced.

    """
    asked = settings.reduce_bucket_size
    if settings.stage == 3:
        together = sum(dtype.itemsize for dtype in dtypes)
        return max(1, asked * _FP32_BYTES // max(_FP32_BYTES, together))
    return max(1, asked // max(1, len(dtypes)))
