"""A model that is built inside deepspeed.OnDevice: its parameters are as in stock, its tables exact."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from support.zero_init import assert_unchanged, replaceable, zero_init
from torch import nn

import safe_rope

pytestmark = [pytest.mark.usefixtures("deepspeed_group"), pytest.mark.contract]
LENGTH, DIM = 4096, 16


class Sinusoids(nn.Module):
    """Asks for FP32 where OnDevice gives its own dtype and device."""

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        positions = torch.arange(length, dtype=torch.float32)[:, None]
        rates = torch.exp(torch.arange(0, dim, 2, dtype=torch.float32) * (-math.log(1e4) / dim))
        table = torch.zeros(length, dim, dtype=torch.float32)
        table[:, 0::2] = torch.sin(positions * rates)
        table[:, 1::2] = torch.cos(positions * rates)
        self.register_buffer("table", table)

    def forward(self, positions: torch.Tensor) -> Any:
        return self.table[positions]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Sinusoids(LENGTH, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("scale", torch.ones(3))


def on_device(device: str, enabled: bool = True) -> Any:
    import deepspeed

    return deepspeed.OnDevice(dtype=torch.bfloat16, device=device, enabled=enabled)


@pytest.mark.parametrize("is_guard_outside", [True, False], ids=["guard outside", "guard inside"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tables_are_exact_and_everything_else_is_deepspeeds(device: str, is_guard_outside: bool) -> None:
    before, true = replaceable(), Sinusoids(LENGTH, DIM).table
    with on_device(device):
        stock = Model()
    with contextlib.ExitStack() as stack:
        if is_guard_outside:
            stack.enter_context(safe_rope.guard(strict=True))
        stack.enter_context(on_device(device))
        if not is_guard_outside:
            stack.enter_context(safe_rope.guard(strict=True))
        model = Model()
        assert torch.zeros(2, dtype=torch.float64).dtype == torch.float64
    assert_unchanged(before)
    saved = {name: (value.dtype, value.device) for name, value in model.state_dict().items()}
    assert saved == {name: (value.dtype, value.device) for name, value in stock.state_dict().items()}
    if device == "meta":
        model.to_empty(device="cpu")
    assert torch.equal(model.positions.table, true)
    assert torch.equal(model.positions(torch.arange(LENGTH)), true.bfloat16())  # rounded once, at its use
    assert safe_rope.audit(model).ok


def test_zero_init_goes_on_after_a_disabled_on_device_inside_it() -> None:
    # An enabled one there loses torch.Tensor.__new__, with the guard as without: both keep it in one place.
    with safe_rope.guard(), zero_init():
        with on_device("cpu", enabled=False):
            pass
        assert torch.arange(3, dtype=torch.float32).dtype == torch.float32
        assert torch.arange(3.0).dtype == torch.bfloat16
        assert Sinusoids(8, DIM).table.dtype == torch.float32
