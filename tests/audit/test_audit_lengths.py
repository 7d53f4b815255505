"""The audit of frequencies that a forward puts in the place of the constructor's, for a length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import safe_rope

LIMIT, PAIRS = 32, 8
SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0 + i / 10 for i in range(PAIRS)],
        "long_factor": [4.0 + i for i in range(PAIRS)],
    },
}

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Llama4TextConfig"), reason="this transformers has no Llama 4"
)


def _model(rope_type: str) -> nn.Module:
    """A model whose complex phases no patch covers: its frequencies are pinned."""
    scaling = {"rope_type": rope_type, "rope_theta": 10000.0, **SCALINGS[rope_type]}
    config = transformers.Llama4TextConfig(
        hidden_size=32,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=2 * PAIRS,
        num_local_experts=1,
        vocab_size=32,
        max_position_embeddings=LIMIT,
    )
    setattr(config, "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", scaling)
    return transformers.Llama4TextModel(config)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("rope_type", SCALINGS)
def test_frequencies_of_a_length_are_right(rope_type: str, cast: bool) -> None:
    stock = _model(rope_type)
    with safe_rope.guard(tables="fp32"):
        model = _model(rope_type)
    if cast:
        model = model.to(torch.bfloat16)
    for length in (LIMIT - 5, 3 * LIMIT, LIMIT - 5, 2 * LIMIT):
        positions = torch.arange(length)[None]
        true, mine = (one.rotary_emb(torch.zeros(1), positions) for one in (stock, model))
        assert torch.equal(mine, true), length
        assert safe_rope.audit(stock).ok, length
        assert safe_rope.audit(model).ok, length


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_frequencies_of_no_length_are_damaged(rope_type: str) -> None:
    with safe_rope.guard():
        model = _model(rope_type)
    rotary = model.rotary_emb
    rotary(torch.zeros(1), torch.arange(3 * LIMIT)[None])
    rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16).float()
    assert safe_rope.audit(model).damaged
