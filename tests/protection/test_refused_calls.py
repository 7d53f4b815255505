"""Calls that cannot be asked for what the stock forward makes of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import safe_rope


class Context:
    """What a module hands to its parts."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner


class Aware(nn.Module):
    """Rotary positions of a module that is known to what it holds."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.context = Context(self)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != position_ids.shape[1]:
            raise ValueError("x and position_ids differ in length")
        phases = position_ids[..., None].to(x.dtype) * self.inv_freq
        return torch.cat((phases.cos(), phases.sin()), dim=-1).to(x.dtype)


def test_a_call_that_raises_says_nothing_of_the_next() -> None:
    with safe_rope.guard():
        module = Aware()
    module.bfloat16()
    ids = torch.arange(2000)[None]
    x = torch.zeros(1, 2000, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="differ in length"):
        module(x, ids[:, :3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = module(x, ids)
    assert torch.equal(found, Aware()(x.float(), ids).bfloat16())
