"""A helper that torch.compile has compiled runs under a guard, and its positions are exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

DIM, LENGTH = 16, 600
compiled = torch.compile(fullgraph=True, backend="eager")


@compiled
def rates(dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)


@compiled
def phases(length: int, frequencies: torch.Tensor) -> torch.Tensor:
    return torch.arange(length, dtype=frequencies.dtype)[:, None] * frequencies


@compiled
def cosines(length: int, frequencies: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(length, dtype=frequencies.dtype)[:, None] * frequencies).cos().to(dtype)


class Cos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cosines(x.shape[1], self.inv_freq, x.dtype)


class Phases(Cos):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return phases(x.shape[1], self.inv_freq)


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.rotary, self.proj = make(), nn.Linear(DIM, DIM // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.rotary(x)
        return (made.cos() if isinstance(self.rotary, Phases) else made) + self.proj(x) * 0


@pytest.mark.parametrize("make", [Cos, Phases])
@pytest.mark.parametrize("how", ["guard", "protect"])
def test_it_is_exact(make: Callable[[], nn.Module], how: str) -> None:
    x = torch.zeros(1, LENGTH, DIM, dtype=torch.bfloat16)
    expected = Model(make)(x.float()).to(torch.bfloat16)
    torch.compiler.reset()
    with safe_rope.guard() if how == "guard" else contextlib.nullcontext():
        model = Model(make)
    model = model.to(torch.bfloat16)
    if how == "protect":
        safe_rope.protect(model)
    for _ in range(2):  # the first call is looked at
        torch.testing.assert_close(model(x), expected, rtol=2**-8, atol=2**-8)
    assert safe_rope.audit(model).verdict == "ok"


def test_what_is_compiled_is_compiled_when_nobody_looks() -> None:
    traced: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        traced.append(graph)
        return graph.forward

    helper = torch.compile(
        lambda n, f, dtype: (torch.arange(n)[:, None] * f).cos().to(dtype), backend=backend
    )

    class Rotary(Cos):
        def forward(self, x: torch.Tensor) -> Any:
            return helper(x.shape[1], self.inv_freq, x.dtype)

    with safe_rope.guard():
        model = Rotary()
    model.to(torch.bfloat16)
    x = torch.zeros(1, LENGTH, DIM, dtype=torch.bfloat16)
    first = model(x)
    torch.testing.assert_close(model(x), first, rtol=0, atol=0)
    assert traced
