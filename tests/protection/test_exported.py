"""What torch.export makes of a protected model holds no more than the forward: it loads, splits and runs."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from support.own_rotary import rotate_half
from torch import Tensor, nn

import safe_rope

DIM, LENGTH = 16, 300
POSITIONS = torch.arange(LENGTH)


class Tables(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        phases = torch.outer(torch.arange(512.0), 1e4 ** (-torch.arange(0, dim, 2) / dim))
        both = torch.cat((phases, phases), -1)
        self.register_buffer("cos_cached", both.cos())
        self.register_buffer("sin_cached", both.sin())

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_cached[positions].to(x.dtype), self.sin_cached[positions].to(x.dtype)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope, self.project = Tables(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rope(x, positions)
        q, k = apply_rotary_pos_emb(x, self.project(x), cos, sin)
        return q @ k.transpose(-1, -2)


def test_a_program_is_kept_lowered_and_run(tmp_path: Path) -> None:
    stock = Model().bfloat16().float()
    stock.rope = Tables()
    x = torch.randn(LENGTH, DIM)
    with safe_rope.guard():
        model = Model()
    model.load_state_dict(copy.deepcopy(stock.state_dict()))
    model.bfloat16().float()
    program = torch.export.export(model, (x, POSITIONS))
    targets = [str(node.target) for node in program.graph.nodes]
    assert not [target for target in targets if "set_grad" in target], "stock's forward leaves no such node"
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2").run_decompositions()
    torch.testing.assert_close(again.module()(x, POSITIONS), stock(x, POSITIONS), rtol=1e-5, atol=1e-5)
