"""A table is excused where code asks for its dtype alone, and not where torch's own code reads it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import safe_rope


class Sinusoids(nn.Embedding):
    """As Marian's: its own code asks for the weight's device, and that of nn.Embedding reads it."""

    def __init__(self, length: int = 64, dim: int = 32) -> None:
        super().__init__(length, dim)
        phase = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.weight = nn.Parameter(torch.cat((phase.sin(), phase.cos()), -1), requires_grad=False)

    def forward(self, length: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.arange(length, device=self.weight.device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_that_torch_reads_is_no_mere_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(Sinusoids())
    assert safe_rope.audit(model).ok
    assert not safe_rope.audit(model.to(dtype).float()).ok


def test_an_empty_weight_that_torch_reads_is_told() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Sinusoids())
    model.to_empty(device="cpu")
    nn.init.constant_(model[0].weight, torch.nan)  # type: ignore[arg-type]
    assert not safe_rope.audit(model).ok
