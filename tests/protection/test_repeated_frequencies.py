"""Frequencies that are the same do not tell which channel is whose, and others may be adopted later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

import safe_rope

HALF = 16
CONFIG = LlamaConfig(hidden_size=2 * HALF, num_attention_heads=1, vocab_size=8)
USUAL = 1.0 / 10000 ** (torch.arange(0, 2 * HALF, 2, dtype=torch.float32) / (2 * HALF))
STARTS = {
    "padded": torch.cat((USUAL[: HALF // 2], torch.zeros(HALF // 2))),
    "clamped": USUAL.clamp(max=0.3),
    "in pairs": USUAL[: HALF // 2].repeat_interleave(2),
    "zeros": torch.zeros(HALF),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda phase: torch.cat((phase, phase), dim=-1),
    "interleaved": lambda phase: phase.repeat_interleave(2, dim=-1),
    "plain": lambda phase: phase,
    "backwards": lambda phase: torch.cat((phase.flip(-1), phase), dim=-1),
}


def built(start: str, arrange: Callable[[Tensor], Tensor]) -> Any:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = CONFIG
            self.register_buffer("inv_freq", STARTS[start].clone(), persistent=False)

        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            phase = arrange(position_ids[..., None].float() * self.inv_freq.float())
            return phase.cos().to(x.dtype), phase.sin().to(x.dtype)

    return Rotary()


@pytest.mark.contract
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inside", [True, False])
def test_frequencies_that_are_put_there_later_are_in_their_channels(
    start: str, layout: str, *, inside: bool
) -> None:
    stock = built(start, LAYOUTS[layout])
    stock.inv_freq.copy_(USUAL)
    with safe_rope.guard(tables="fp32"):
        rotary = nn.ModuleDict({"rotary_emb": built(start, LAYOUTS[layout])})["rotary_emb"]
        if inside:
            rotary.inv_freq.copy_(USUAL)
    if not inside:
        rotary.inv_freq.copy_(USUAL)
    x, positions = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 50]])
    for answer, true in zip(rotary(x, positions), stock(x, positions), strict=True):
        assert torch.equal(answer, true)


@pytest.mark.contract
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frequencies_that_nobody_changes_stay_what_the_constructor_gives(start: str, layout: str) -> None:
    stock = built(start, LAYOUTS[layout])
    with safe_rope.guard(tables="fp32"):
        model = nn.ModuleDict({"rotary_emb": built(start, LAYOUTS[layout])})
    x, positions = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 50]])
    for answer, true in zip(model.bfloat16()["rotary_emb"](x, positions), stock(x, positions), strict=True):
        assert torch.equal(answer, true)


@pytest.mark.contract
@pytest.mark.parametrize("start", STARTS)
def test_where_axes_are_merged_such_frequencies_tell_no_axis_either(start: str) -> None:
    stock = built(start, _of_axes_in_turn)
    with safe_rope.guard(tables="fp32"):
        rotary = nn.ModuleDict({"rotary_emb": built(start, _of_axes_in_turn)})["rotary_emb"]
    stock.inv_freq.copy_(USUAL)
    rotary.inv_freq.copy_(USUAL)
    x, positions = torch.zeros(1, 3, 4), torch.tensor([[[0, 1, 50]], [[0, 7, 9]], [[3, 2, 11]]])
    for answer, true in zip(rotary(x, positions), stock(x, positions), strict=True):
        assert torch.equal(answer, true)


def _of_axes_in_turn(phase: Tensor) -> Tensor:
    merged = phase[0].clone()
    for axis in (1, 2):
        merged[..., axis::3] = phase[axis][..., axis::3]
    return torch.cat((merged, merged), dim=-1)
