"""What a forward keeps or hands out comes exact, in the stock model's dtype, from graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import nn

import safe_rope

DIM, LENGTH = 32, 1500
X = (torch.arange(LENGTH * DIM) % 17 - 8).reshape(1, LENGTH, DIM).bfloat16() / 8


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def turned(x: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * phase.cos() + torch.cat((-second, first), -1) * phase.sin()


class Rotary(nn.Module):
    """Counts in the dtype of its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        self.register_buffer("inv_freq", rates, persistent=False)
        self.register_buffer("kept", None, persistent=False)

    def phases(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).type_as(self.inv_freq), self.inv_freq).repeat(1, 2)

    def forward(self, length: int) -> torch.Tensor:
        return self.phases(length)


class KeepsPhases(Rotary):
    def forward(self, length: int) -> torch.Tensor:
        if self.kept is None:
            self.register_buffer("kept", self.phases(length), persistent=False)
        kept: torch.Tensor = self.kept
        return kept[:length]


class HasAScale(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", (torch.arange(0, DIM, 2) + 0.4 * DIM) / (1.4 * DIM))

    def forward(self, length: int) -> torch.Tensor:
        return self.phases(length) * (self.scale[0] * 0 + 1)


class RotatesBesides(Rotary):
    """Has a method that takes sines, which its forward does not call."""

    @staticmethod
    def apply(x: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
        return turned(x, phase)


class Attention(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.rotary, self.proj = make(), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.proj(turned(x, self.rotary(x.shape[1])))
        return result


class FillsPhases(Rotary):
    """Has a place for phases, which its first forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(LENGTH, DIM), persistent=False)
        self.filled = 0

    def forward(self, length: int) -> torch.Tensor:
        if self.filled < length:
            self.kept[:length] = self.phases(length).detach()
            self.filled = length
        kept: torch.Tensor = self.kept
        return kept[:length]


@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("make", [Rotary, KeepsPhases, FillsPhases, HasAScale, RotatesBesides])
def test_phases_are_exact_in_the_dtype_of_stock(
    make: Callable[[], nn.Module], is_compiled: bool, is_called_before: bool
) -> None:
    if make is FillsPhases and not is_called_before:
        pytest.skip("what is filled after a cast has the dtype of its place, as in stock")
    stock = Attention(make)
    nn.init.eye_(stock.proj.weight)
    true = stock(X.float())
    with safe_rope.guard():
        model = Attention(make)
    nn.init.eye_(model.proj.weight)
    if is_called_before:
        assert torch.equal(model(X.float()), true)
    model.bfloat16()
    compiled = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    for _ in range(2):  # the second call finds what the first has kept
        result = compiled(X)
        assert result.dtype == torch.bfloat16
        assert float((result.float() - true).detach().abs().max()) < 0.05


class KeepsFp32(nn.Module):
    """Keeps tables in FP32 by their length, whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.cache:
            steps = torch.arange(x.shape[1], dtype=torch.float32)
            rates = 10000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
            self.cache[x.shape[1]] = torch.outer(steps, rates).repeat(1, 2).sin()
        return self.cache[x.shape[1]]


def test_what_stock_keeps_in_fp32_comes_in_fp32() -> None:
    with safe_rope.guard():
        module = KeepsFp32()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(X), KeepsFp32()(X))
