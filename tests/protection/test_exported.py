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


class Rope(nn.Module):
    """Makes cos and sin of frequencies that it widens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, DIM, 2) / DIM), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = self.inv_freq[None, :, None].float() @ position_ids[:, None, :].float()
        both = torch.cat((freqs, freqs), 1).transpose(1, 2)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class Attention(nn.Module):
    """Rotates by the whole tables, by parts of them, or beside the function that does so elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.rope, self.project = how, Rope(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rope(x, torch.arange(3000, 3000 + x.shape[1])[None])
        q, v = self.project(x), x
        if self.how == "inline":
            q = q * cos + rotate_half(q) * sin
            return q @ v.transpose(-1, -2)
        if self.how == "slice":
            q, v, cos, sin = q[:, -3:], v[:, -3:], cos[:, -3:], sin[:, -3:]
        elif self.how == "index":
            rows = torch.tensor([0, 2, 4])
            q, v, cos, sin = q[:, rows], v[:, rows], cos[:, rows], sin[:, rows]
        elif self.how == "stack":
            cos, sin = torch.stack((cos, sin)).unbind(0)
        q, _ = apply_rotary_pos_emb(q, v, cos, sin)
        return q @ v.transpose(-1, -2)


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


def test_what_a_model_does_to_its_tables_runs_as_in_stock() -> None:
    torch.manual_seed(0)
    project = nn.Linear(DIM, DIM).bfloat16()
    x = torch.randn(2, 40, DIM).bfloat16()
    for how in ("whole", "slice", "index", "stack", "inline"):
        true, stock = Attention(how), Attention(how).bfloat16()
        with safe_rope.guard():
            model = Attention(how)
        model.bfloat16()
        for one in (true, stock, model):
            one.project.load_state_dict(project.state_dict())
        expected = true(x.float())
        error = (stock(x).float() - expected).abs().max()
        for strict in (False, True):
            result = torch.export.export(model, (x,), strict=strict).module()(x)
            assert result.dtype == torch.bfloat16, (how, strict)
            assert (result.float() - expected).abs().max() < 0.1 * error, (how, strict)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")(x)
        assert compiled.dtype == torch.bfloat16, how
        assert (compiled.float() - expected).abs().max() < 0.1 * error, how
