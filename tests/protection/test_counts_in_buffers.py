"""Integers in a float buffer stay integers: 16 bits cannot hold the larger ones, and they choose rows."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope._base.torch_private import graphs_take_attributes

BF16 = torch.bfloat16
LENGTH = 600


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(float(LENGTH)), persistent=False)
        self.emb = nn.Embedding(LENGTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.position_ids[: x.shape[-1]].long()


class WithoutWeights(Positions):
    def __init__(self) -> None:
        super().__init__()
        del self.emb


class RelativeIndex(nn.Module):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn((2 * width - 1) ** 2, 1))
        at = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(width), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + width - 1
        index = torch.zeros(width * width, width * width)
        index[:] = apart[..., 0] * (2 * width - 1) + apart[..., 1]
        self.register_buffer("index", index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.index.long().view(-1)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Positions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.position_ids.long()


class Added(Positions):
    """Adds counts to activations: they are rounded there, and the dtype is the stock model's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position_ids


class Scheduler(nn.Module):
    def __init__(self, steps: int = 1000) -> None:
        super().__init__()
        self.register_buffer("timesteps", torch.linspace(steps - 1, 0, steps))


class Denoiser(nn.Module):
    """Takes sines of its scheduler's timesteps."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.freqs = [1e4 ** (-i / 16) for i in range(16)]

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        phases = self.scheduler.timesteps[steps][:, None] * torch.tensor(self.freqs, dtype=torch.float32)
        return torch.cat((phases.sin(), phases.cos()), -1)


def test_timesteps_are_positions_and_stay_exact() -> None:
    steps = torch.tensor([2, 301, 498])
    true, stock = Denoiser()(steps), Denoiser().to(BF16)
    assert float((stock(steps) - true).abs().max()) > 0.5
    assert safe_rope.audit(stock).verdict == "damaged"
    with safe_rope.guard():
        model = Denoiser()
    model.to(BF16)
    assert torch.equal(model(steps), true)
    assert safe_rope.audit(model).ok
    safe_rope.protect(stock)
    assert torch.equal(stock(steps), true)


EXACT = (Positions, WithoutWeights, RelativeIndex, Parent)
X = torch.randn(1, LENGTH)


@pytest.mark.parametrize("how", ["eager", "graph", "copied", "half"])
@pytest.mark.parametrize("cls", EXACT)
def test_indices_are_the_fp32_models(cls: type[nn.Module], how: str) -> None:
    true = cls()(X)
    low = torch.float16 if how == "half" and cls is RelativeIndex else BF16
    with safe_rope.guard():
        model = cls()
    model.to(low)
    model = copy.deepcopy(model) if how == "copied" else model
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "graph" else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        are_right = [torch.equal(run(X.to(low)), true) for _ in range(2)]
    # Graphs of some older torch keep no FP32 beside lower dtypes, and then it is said.
    may_round = how == "graph" and not graphs_take_attributes()
    named = [one for one in caught if "keeps integers in" in str(one.message)]
    assert all(are_right) or (may_round and named)


def test_counts_that_meet_activations_have_the_stock_models_dtype() -> None:
    stock = Added().to(BF16)
    with safe_rope.guard():
        model = Added()
    model.to(BF16)
    assert torch.equal(model(X.to(BF16)), stock(X.to(BF16)))
