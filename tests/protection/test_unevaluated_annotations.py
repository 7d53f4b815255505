"""Annotations may name what is not there, which CPython from 3.14 on never evaluates by itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import safe_rope

SOURCE = """
import torch
from torch import nn

class Rotary(nn.Module):
    scale: Nowhere

    def __init__(self, config: Nowhere = None):
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, 8, 2).float() / 8), persistent=False)

    def forward(self, x: Nowhere, position_ids: Nowhere) -> Nowhere:
        phase = position_ids[..., None].float() * self.inv_freq
        phase = torch.cat((phase, phase), -1)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)

def rotate_half(x: Nowhere) -> Nowhere:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)

def apply_rotary_pos_emb(q: Nowhere, k: Nowhere, cos, sin, position_ids=None, unsqueeze_dim=1) -> Nowhere:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

class Attention(nn.Module):
    def __init__(self, config: Nowhere = None):
        super().__init__()
        self.rotary = Rotary()

    def forward(self, x: Nowhere) -> Nowhere:
        cos, sin = self.rotary(x, torch.arange(3000, 3000 + x.shape[1])[None])
        return apply_rotary_pos_emb(x[:, None], x[:, None], cos, sin)[0]
"""


@pytest.mark.contract
@pytest.mark.skipif(sys.version_info < (3, 14), reason="this Python evaluates them where they stand")
@pytest.mark.parametrize("by", ["guard", "protect"])
def test_a_model_whose_annotations_name_what_is_not_there_is_protected(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(sys)("unevaluated")
    monkeypatch.setitem(sys.modules, "unevaluated", module)
    exec(compile(SOURCE, "unevaluated", "exec", dont_inherit=True), vars(module))
    attention: Any = vars(module)["Attention"]
    x = torch.linspace(-1, 1, 24).view(1, 3, 8)
    true = attention()(x)
    assert safe_rope.audit(attention().to(torch.bfloat16)).verdict == "damaged"
    if by == "guard":
        with safe_rope.guard():
            model = attention()
    else:
        model = attention()
        assert not safe_rope.protect(model).unprotected
    model.to(torch.bfloat16)
    assert safe_rope.audit(model).ok
    torch.testing.assert_close(model(x.bfloat16()).float(), true, rtol=0, atol=2.0**-6)
