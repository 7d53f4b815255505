"""Tensors that the whole process keeps on a device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def kept_on(device: torch.device, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return copies on ``device`` that belong to nothing that runs now.

    While torch warms a CUDA graph up, all that this thread allocates on its stream is the graph's, and what
    stays of it is an error. Another thread has memory and a stream besides.
    """
    if device.type != "cuda":
        return tuple([tensor.to(device) for tensor in tensors])
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(_moved, device, tensors).result()


def _moved(device: torch.device, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad(), torch.cuda.device(device):
        copies = tuple([tensor.to(device) for tensor in tensors])
        torch.cuda.current_stream(device).synchronize()  # other streams read them, from now on
    return copies
