"""What a forward of a module with weights sets in the place of what was built stays for its next call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.guarded import guarded
from torch import nn

LONG, SHORT, DIM = 400, 100, 32


def rates(base: float = 10000.0) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, DIM, 2).float() / DIM)


def turned(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    phase = torch.arange(x.shape[1])[:, None] * inv_freq.float()
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM, bias=False)
        nn.init.eye_(self.proj.weight)


class OtherFrequencies(WithWeights):
    """Dynamic NTK in an attention: other frequencies from the first long call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > SHORT:
            self.inv_freq = rates(20000.0)
        return turned(self.proj(x), self.inv_freq)


class OtherTable(WithWeights):
    """A table of the same shape for another base, in the dtype of x."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", self.table(10000.0), persistent=False)

    def table(self, base: float) -> torch.Tensor:
        return torch.outer(torch.arange(LONG).float(), rates(base)).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > SHORT:
            self.cos = self.table(5000.0).to(x.dtype)
        return self.proj(x)[..., : DIM // 2] * self.cos[: x.shape[1]].to(x.dtype)


class States(WithWeights):
    """Levels that each call moves, beside frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        self.register_buffer("levels", torch.linspace(0, 1, DIM))

    def move(self, x: torch.Tensor) -> None:
        self.levels = 0.5 * self.levels + 0.5 * x.abs().amax((0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.move(x)
        return turned(self.proj(x), self.inv_freq) + self.levels.to(x.dtype)


class Rolled(States):
    def move(self, x: torch.Tensor) -> None:
        self.register_buffer("levels", self.levels.roll(1) + 0.25)


class MovedTogether(States):
    """Several states by one function, of which one is no table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def move(self, x: torch.Tensor) -> None:
        torch._foreach_add_([self.calls, self.levels], 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.calls.to(x.dtype)


def outputs(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a short call, a long one and another short one give, and a copy after that."""
    model = model.to(dtype)
    found = []
    with torch.no_grad():
        for length in (SHORT, LONG, SHORT):
            steps = torch.arange(length * DIM).reshape(1, length, DIM)
            x = ((steps * 37) % 17 - 8).to(dtype) / 8
            found.append(model(x))
        found.append(copy.deepcopy(model)(x))
    return found


@pytest.mark.contract
@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("make", [OtherFrequencies, OtherTable, States, Rolled, MovedTogether])
def test_the_next_call_sees_what_the_last_one_has_set(make: Callable[[], nn.Module], how: str) -> None:
    true = outputs(make(), torch.float32)
    stock = outputs(make(), torch.bfloat16)
    ours = outputs(guarded(make, how), torch.bfloat16)
    for exact, before, after in zip(true, stock, ours, strict=True):
        assert after.dtype == before.dtype
        allowed = (before.float() - exact).abs().max() + 2.0**-8 * exact.abs().max()
        assert (after.float() - exact).abs().max() <= allowed
