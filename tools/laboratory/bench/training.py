"""A whole training step of a small Llama with the guard, against the same model without it, three times over.

The three that are alike say how far two medians differ without a reason: that is the noise.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import safe_rope
from laboratory.bench.timing import Row, clock, wait

ROUNDS = 24
CONTROLS = ("without it", "without it, again", "without it, once more")


def measure(device: str) -> list[Row]:
    """Return the step's row with the guard, and a control's row for each that is without."""
    torch.manual_seed(0)
    ids = torch.randint(1000, (2, 512), device=device)
    steps = {name: _step(name == "with the guard", ids) for name in ("with the guard", *CONTROLS)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    now = clock(device)
    # Each goes first, second, third and last equally often: what one leaves in the caches meets all.
    orders = list(itertools.permutations(steps))
    for index in range(-2, ROUNDS):
        for name in orders[index * 7 % len(orders)]:
            wait(device)
            began = now()
            steps[name]()
            wait(device)
            if index >= 0:
                times[name].append(now() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    without = statistics.median([value for name in CONTROLS for value in times[name]])
    noise = max(abs(medians[name] / without - 1) for name in CONTROLS)
    row = Row(
        "a training step with the guard", "all without it", medians["with the guard"], without, 1.0, noise
    )
    controls = [Row(f"a training step {name}", "all without it", medians[name], without) for name in CONTROLS]
    return [row, *controls]


def _step(guarded: bool, ids: Tensor) -> Callable[[], None]:
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(ids.device, torch.bfloat16)
    if guarded:
        safe_rope.protect(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return run
