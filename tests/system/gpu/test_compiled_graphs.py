"""torch.compile captures a guarded model in CUDA graphs from its first call on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import safe_rope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("tables", ["exact", "fp32"])
def test_what_the_tables_take_is_not_the_graphs(tables: Any) -> None:
    """The first call, which makes the tables on the device, is the one that warms the graph up."""
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64}
    # Another theta for each: no other test has made these tables.
    theta = {"exact": 12_345.0, "fp32": 12_346.0}[tables]
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=2, rope_theta=theta, use_cache=False
    )
    with safe_rope.guard(tables=tables):
        model: Any = transformers.LlamaForCausalLM(config)
    model.to("cuda", torch.bfloat16).eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            ids = torch.randint(97, (1, 32), device="cuda")
            found = compiled(input_ids=ids).logits.clone()
    torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=0.02, atol=0.02)
