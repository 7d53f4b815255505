"""What the code of a class can get at is looked at from near to far, in one order in every process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import safe_rope
from safe_rope._recognition.outside import OutOfReachError, outside


class Heap:
    """Holds more values than are looked at."""

    def __init__(self) -> None:
        self.parts = [[[number] for number in range(60)] for _ in range(60)]


HEAP = Heap()
NUMBERS = (number for number in range(8))
_NUMBERS, _HEAP = NUMBERS, HEAP  # in the other order of names


class TakesFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + len(HEAP.parts) + next(NUMBERS)


class TakesLast(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + next(_NUMBERS) + len(_HEAP.parts)


@pytest.mark.parametrize("cls", [TakesFirst, TakesLast])
def test_what_is_near_is_found_whatever_else_there_is(cls: type[nn.Module]) -> None:
    with pytest.raises(OutOfReachError, match="generator"):
        outside(cls)


class Asserts(nn.Module):
    """Its assertion is rewritten by pytest, whose own modules lead to generators."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, 32, 2).float() / 32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 3, "batch, length, width"
        phases = torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float()
        return torch.cat((phases.cos(), phases.sin()), dim=-1)


def test_a_module_of_tests_may_assert() -> None:
    module = Asserts().bfloat16()
    report = safe_rope.protect(module)
    assert not report.unprotected, report
    x = torch.zeros(1, 300, 32)
    assert torch.equal(module(x), Asserts()(x))
