"""Frequencies that a module makes anew in forward: followed, and not called damaged while they are right."""

from __future__ import annotations

import copy
import math
from typing import Any

import no_harm
import pytest
import torch
from no_harm import BF16, DIM, Holder
from torch import nn

import safe_rope


class SuScaled(nn.Module):
    """As OmniGen's: the buffer is stale until the first forward, which makes frequencies of its own."""

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 131072,
        original_max_position_embeddings: int = 4096,
        base: float = 10000,
        rope_scaling: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.max_position_embeddings = max_position_embeddings
        self.original_max_position_embeddings = original_max_position_embeddings
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim))
        self.register_buffer("inv_freq", tensor=inv_freq, persistent=False)
        assert rope_scaling is not None
        self.short_factor, self.long_factor = rope_scaling["short_factor"], rope_scaling["long_factor"]

    def forward(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        long = torch.max(position_ids) + 1 > self.original_max_position_embeddings
        factors = torch.tensor(self.long_factor if long else self.short_factor, dtype=torch.float32)
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        self.inv_freq = 1.0 / (factors * self.base**steps)
        freqs = (self.inv_freq[None, :, None] @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)[0]
        scale = self.max_position_embeddings / self.original_max_position_embeddings
        scaling = math.sqrt(1 + math.log(scale) / math.log(self.original_max_position_embeddings))
        return emb.cos() * scaling, emb.sin() * scaling


def su_scaled() -> nn.Module:
    factors = {
        "short_factor": [1.0 + i / DIM for i in range(DIM // 2)],
        "long_factor": [2.0 + i for i in range(DIM // 2)],
    }
    return SuScaled(DIM, rope_scaling=factors)


@pytest.mark.parametrize("before", ["forward", "nothing"])
@pytest.mark.parametrize("cast", [False, True], ids=["FP32", "to(bfloat16)"])
@pytest.mark.parametrize("how", ["stock", "guard", "protect"])
def test_a_right_model_with_a_stale_buffer_is_not_called_damaged(how: str, cast: bool, before: str) -> None:
    if how == "guard":
        model, _ = no_harm.guarded(lambda: Holder(su_scaled()), tables="exact")
    else:
        model = Holder(su_scaled())
        if how == "protect":
            no_harm.protected(model, tables="exact")
    if cast:
        model.to(BF16)
    ids, truth = torch.arange(200)[None], su_scaled()
    for _ in range(2 if before == "forward" else 0):
        for got, true in zip(model.rope(torch.zeros(1), ids), truth(torch.zeros(1), ids), strict=True):
            assert torch.equal(no_harm.plain(got), true)
    assert not safe_rope.audit(model).damaged
    for got, true in zip(model.rope(torch.zeros(1), ids), truth(torch.zeros(1), ids), strict=True):
        assert torch.equal(no_harm.plain(got), true)


def test_its_frequencies_follow_the_length_of_the_sequence() -> None:
    model, _ = no_harm.guarded(lambda: Holder(su_scaled()))
    truth = su_scaled()
    for length in (200, 5000, 200):
        ids = torch.arange(length)[None]
        for rotary in (model.rope, copy.deepcopy(model).half().float().rope):
            answer = zip(rotary(torch.zeros(1), ids), truth(torch.zeros(1), ids), strict=True)
            assert all(torch.equal(no_harm.plain(got), true) for got, true in answer), length
