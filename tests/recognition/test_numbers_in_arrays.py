"""NumPy arrays that a constructor takes out of tensors: a low default dtype reaches them, no cast does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safe_rope

BF16 = torch.bfloat16


@contextlib.contextmanager
def low() -> Iterator[None]:
    torch.set_default_dtype(BF16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class InArrays(nn.Module):
    """Cos and sin of counts in the default dtype, as arrays; and arrays that are no positions."""

    def __init__(self, dim: int = 16, length: int = 512, with_buffer: bool = False) -> None:
        super().__init__()
        self.dim, self.length, self.with_buffer = dim, length, with_buffer
        inv_freq = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        counts = torch.cumsum(torch.ones(length), 0) - 1
        phase = torch.outer(counts.float(), inv_freq)
        self.cos_np, self.sin_np = phase.cos().float().numpy(), phase.sin().float().numpy()
        self.mel_basis = (torch.ones(8) / 3).float().numpy()
        self.drawn = np.random.default_rng(0).random(8)
        if with_buffer:
            self.register_buffer("scale", torch.ones(3))
        self.lin = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        cos, sin = torch.from_numpy(self.cos_np)[:length], torch.from_numpy(self.sin_np)[:length]
        first, second = self.lin(x).chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def _error(module: Any) -> float:
    true = InArrays()
    pairs = ((module.cos_np, true.cos_np), (module.sin_np, true.sin_np))
    return max(float(np.abs(one - other).max()) for one, other in pairs)


@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.contract
def test_arrays_that_a_low_default_dtype_has_spoilt_are_repaired(with_buffer: bool) -> None:
    with low():
        stock = InArrays(with_buffer=with_buffer)
        with safe_rope.guard():
            model = nn.Sequential(InArrays(with_buffer=with_buffer), InArrays(with_buffer=with_buffer))
    assert _error(stock) > 1.0
    assert safe_rope.audit(stock).verdict == "damaged"
    assert {finding.what for finding in safe_rope.audit(stock).findings} == {"cos_np", "sin_np"}
    for module in model:
        assert _error(module) == 0.0
        assert np.array_equal(module.mel_basis, stock.mel_basis), "a filterbank is as it was"
    assert model[0].cos_np is not model[1].cos_np
    assert safe_rope.audit(model).ok
    safe_rope.protect(stock)
    assert _error(stock) == 0.0


def test_arrays_that_are_right_stay_the_same_objects() -> None:
    with safe_rope.guard() as session:
        module = InArrays()
    own = module.cos_np, module.drawn
    report = safe_rope.protect(module)
    assert module.cos_np is own[0]
    assert module.drawn is own[1]
    for one in (session.report, report):
        assert (one.protected, one.unprotected, one.left) == ([], [], [])
    assert safe_rope.audit(module).ok


def test_arrays_that_somebody_has_changed_are_kept() -> None:
    with low(), safe_rope.guard():
        module = InArrays()
    module.cos_np = module.cos_np * 1.5
    own = module.cos_np
    safe_rope.protect(module)
    assert module.cos_np is own
