"""Tables that zero.Init has damaged and that no constructor gives again: never ok, and named by `protect`."""

from __future__ import annotations

import math

import pytest
import torch
from support.zero_init import zero_init
from torch import Tensor, nn

import safe_rope

pytestmark = pytest.mark.usefixtures("deepspeed_group")


class Sinusoids(nn.Module):
    """It keeps none of its arguments, and calls its table what no position is called."""

    def __init__(self, dim: int, rows: int) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        phases = torch.einsum("i,j->ij", torch.arange(0, rows, dtype=torch.float), inv_freq)
        self.register_buffer("emb", torch.cat((phases.sin(), phases.cos()), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.emb[None, : x.shape[1]].to(x)


class Drawn(nn.Module):
    def __init__(self, dim: int, rows: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(dim // 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        phases = x[:, None] * self.weights[None] * 6.25
        return torch.cat((phases.sin(), phases.cos()), dim=-1)


class Stretched(nn.Module):
    """It was built with another scale than its constructor's default, which it does not keep."""

    def __init__(self, dim: int, rows: int, scale: float = 1.0) -> None:
        super().__init__()
        self.dim, self.rows = dim, rows
        steps = torch.arange(rows, dtype=torch.float32) / scale
        phases = torch.outer(steps, 10000 ** (-torch.arange(0, dim, 2) / dim))
        self.register_buffer("pe", torch.cat((phases.sin(), phases.cos()), -1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.shape[1]].to(x.dtype)


class ReadByOthers(nn.Module):
    """SpeechBrain's: it has no forward, and holds each value twice, every second sine negative."""

    def __init__(self, dim: int, rows: int) -> None:
        super().__init__()
        angles = torch.exp(torch.arange(0, dim, 2, dtype=torch.float32) * -(math.log(10000.0) / dim))
        phases = torch.outer(torch.arange(0, rows, dtype=torch.float32), angles)
        cosines, sines = (torch.stack((one, one), dim=-1).flatten(-2) for one in (phases.cos(), phases.sin()))
        self.register_buffer("cosines", cosines.float())
        self.register_buffer("sines", (-1) ** torch.arange(dim, dtype=torch.float32) * -sines)


@pytest.mark.parametrize("rows", [512, 1600])
@pytest.mark.parametrize("cls", [Sinusoids, Drawn, Stretched, ReadByOthers])
def test_nobody_can_say_before_and_after_protect(cls: type[nn.Module], rows: int) -> None:
    arguments = (64, rows, 4.0) if cls is Stretched else (64, rows)
    with zero_init():
        model = cls(*arguments)
    if cls is not Drawn:
        name, table = next(model.named_buffers())
        assert (table.float() - getattr(cls(*arguments), name)).abs().max() > 0.1
    assert [one.verdict for one in safe_rope.audit(model).modules] == ["unknown"]
    report = str(safe_rope.protect(model))
    assert report.startswith("0 position modules protected"), report
    assert cls.__name__ in report, report
    assert [one.verdict for one in safe_rope.audit(model).modules] == ["unknown"]
