"""A longrope model on a device, which nobody asks for the factors that it has used."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from support.devices import DEVICE, is_there

import safe_rope

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_there(), reason="needs a CUDA device")]


def test_a_model_that_has_run_long_is_still_ok() -> None:
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [2.5] * 16,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 512,
        },
    )
    with safe_rope.guard():
        model = transformers.Phi3ForCausalLM(config).eval()
    ids = torch.randint(97, (1, 600))
    with torch.no_grad():
        expected = copy.deepcopy(model)(ids).logits
        model.to(DEVICE)
        for length in (600, 30, 600):
            found = model(ids[:, :length].to(DEVICE)).logits.cpu()
            assert safe_rope.audit(model).ok, safe_rope.audit(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
