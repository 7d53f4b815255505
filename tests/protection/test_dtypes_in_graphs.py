"""A compiled forward gives the dtype that it gives in stock, whatever methods its class has besides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import safe_rope

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.torch]
LENGTH = 300


def sines(phases: torch.Tensor) -> torch.Tensor:
    return torch.cat([phases.sin(), phases.cos()], dim=-1)


class Bands(nn.Module):
    """As timm's FourierEmbed: FP32 in every dtype, and a method that a loader calls makes the buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", self.make(), persistent=False)

    def make(self) -> torch.Tensor:
        return 2.0 ** torch.linspace(0, 3.7, 8)

    def init_buffers(self) -> None:
        self.bands = self.make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sines(torch.arange(x.shape[1], dtype=torch.float32)[:, None] * self.bands.float())


class InitsInADtype(Bands):
    def init_buffers(self) -> None:
        self.bands = self.make().to(self.bands.dtype)


class InTheirDtype(Bands):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sines(torch.arange(x.shape[1])[:, None] * self.bands)


class Keeps(Bands):
    """Its forward keeps what it made, by a method."""

    def fill(self, length: int) -> torch.Tensor:
        self.last = torch.arange(length).float()[:, None] * self.bands
        return self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sines(self.fill(x.shape[1]))


class KeepsInItsBase(Keeps):
    def fill(self, length: int) -> torch.Tensor:
        return super().fill(length)


@pytest.mark.parametrize("cls", [Bands, InitsInADtype, InTheirDtype, Keeps, KeepsInItsBase])
def test_a_compiled_forward_gives_the_dtype_of_stock(cls: type[nn.Module]) -> None:
    x = torch.zeros(1, LENGTH, 16, dtype=torch.bfloat16)
    true, stock = cls()(x), cls().to(torch.bfloat16)(x)
    with safe_rope.guard():
        model = cls()
    compiled = torch.compile(model.to(torch.bfloat16), backend="eager")
    for made in (compiled(x), model(x), compiled(x)):
        assert made.dtype == stock.dtype
        assert torch.equal(made, true.to(stock.dtype))
    if isinstance(model, Keeps):
        assert torch.equal(sines(model.last), true)
