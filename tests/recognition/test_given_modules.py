"""A constructor that is given a module may change it; run again, it changes a copy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import safe_rope


class Adapted(nn.Module):
    """Holds sines, and puts a layer into the model that it gets, writes to its weight and moves its bias."""

    def __init__(self, model: nn.Module, others: list[nn.Module]) -> None:
        super().__init__()
        self.model = model
        phase = torch.outer(torch.arange(600.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
        self.register_buffer("sines", torch.cat((phase.sin(), phase.cos()), -1), persistent=False)
        for one in (model, *others):
            one.adapters["own"] = nn.Linear(8, 8)
            with torch.no_grad():
                one.linear.weight.mul_(2)
            one.linear.bias = nn.Parameter(one.linear.bias + 1)
            one.count += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + self.sines[: x.shape[-2]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adapters, self.count = nn.Linear(8, 8), nn.ModuleDict(), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.adapters["own"](self.linear(x))


def _made() -> tuple[Adapted, Model]:
    torch.manual_seed(0)
    other = Model()
    return Adapted(Model(), [other]), other


def test_what_a_constructor_does_to_the_modules_that_it_gets_is_done_once() -> None:
    stock, stock_other = _made()
    with safe_rope.guard():
        model, other = _made()
    for expected, got in ((stock.model, model.model), (stock_other, other)):
        assert got.count == expected.count == 1
        assert {name: p.device.type for name, p in got.named_parameters()} == dict.fromkeys(
            expected.state_dict(), "cpu"
        )
        assert all(torch.equal(got.state_dict()[name], one) for name, one in expected.state_dict().items())
    x = torch.randn(2, 300, 8)
    expected = stock(x)
    model.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(model.sines, stock.sines)
    assert (model(x) - expected).abs().max() < 0.1
