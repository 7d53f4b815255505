"""Held rows that a longer sequence makes anew are measured; tables that no answer depends on are notes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import safe_rope

BF16, DIM, ROWS = torch.bfloat16, 32, 64


def inverse(base: float = 1e4) -> Tensor:
    return 1.0 / base ** (torch.arange(0, DIM, 2).float() / DIM)


class Grows(nn.Module):
    """fairseq's sinusoids: made anew for more positions than there are rows."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled
        self.register_buffer("weights", self.made(ROWS), persistent=False)

    def made(self, rows: int) -> Tensor:
        base = 1e4 * (rows / ROWS if self.scaled else 1)
        phases = torch.outer(torch.arange(rows).float(), inverse(base))
        return torch.cat((phases.sin(), phases.cos()), 1)

    def forward(self, position_ids: Tensor) -> Tensor:
        rows = int(position_ids.max()) + 1
        if rows > len(self.weights):
            self.weights = self.made(rows)
        return self.weights[position_ids]


def model_of(part: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), part)


DAMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded": lambda table: table.to(BF16),
    "zeros": lambda table: torch.zeros_like(table),
    "swapped": lambda table: table.roll(DIM // 2, 1),
    "shifted": lambda table: table.roll(1, 0),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_held_rows_that_short_sequences_read_are_measured(how: str) -> None:
    model = model_of(Grows())
    assert safe_rope.audit(model).ok
    model[1].weights = DAMAGE[how](model[1].weights)
    short = torch.arange(ROWS)[None]
    assert not torch.allclose(model[1](short).float(), Grows()(short), atol=1e-4)
    assert not safe_rope.audit(model).ok


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_that_a_longer_sequence_has_made_are_right(scaled: bool) -> None:
    model = model_of(Grows(scaled))
    model[1](torch.arange(3 * ROWS)[None])
    assert safe_rope.audit(model).ok
    model[1].weights = model[1].weights.to(BF16)
    assert not safe_rope.audit(model).ok


class Anew(nn.Module):
    """Its forward takes no notice of what it keeps."""

    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.base = 1e4
        self.register_buffer("inv_freq", inverse(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phases = position_ids[..., None].float() * (self.inv_freq if self.reads else inverse(self.base))
        return phases.cos(), phases.sin()


class Reads(Anew):
    reads = True


class ReadsBeside(Anew):
    def turned(self, x: Tensor) -> Tensor:
        return (x * self.inv_freq).cos()


@pytest.mark.parametrize("cls", [Anew, Reads, ReadsBeside])
def test_only_a_table_that_nothing_reads_does_no_harm(cls: type[Anew]) -> None:
    report = safe_rope.audit(model_of(cls()).to(BF16))
    assert report.ok == (cls is Anew), str(report)
    assert "inv_freq: bfloat16" in str(report)


def test_a_llama_whose_frequencies_were_made_again_is_ok() -> None:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=1)
    model = LlamaModel(config).to(BF16)
    rotary = getattr(model, "rotary_emb", None)
    if rotary is None or not hasattr(rotary, "original_inv_freq"):
        pytest.skip("this release keeps frequencies elsewhere")
    assert not safe_rope.audit(model).ok
    rotary.inv_freq = inverse()
    assert safe_rope.audit(model).ok
