"""Forwards without tables are asked for activations and numbers that fit them, and for enough places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audited import Model
from torch import nn

import safe_rope

DIM, LENGTH = 24, 300


class FromTheWidth(nn.Module):
    """Makes everything in its forward, which takes no other width."""

    low = False

    def __init__(self, dim: int = DIM, base: float = 1e4) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def speeds(self) -> torch.Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device).to(x.dtype if self.low else torch.float32)
        phases = places.float()[:, None] * self.speeds()
        return x * torch.cat((phases.cos(), phases.sin()), -1).to(x.dtype)


class CountsLow(FromTheWidth):
    low = True


class FromAList(FromTheWidth):
    def __init__(self, dim: int = DIM) -> None:
        nn.Module.__init__(self)
        self.listed = tuple(1e4 ** (-k / dim) for k in range(0, dim, 2))

    def speeds(self) -> torch.Tensor:
        return torch.tensor(self.listed)


class FromAListLow(FromAList):
    low = True


def off_by(part: Any) -> float:
    x = torch.ones(1, LENGTH, DIM)
    return float((part(x.bfloat16()).float() - part(x)).abs().max())


@pytest.mark.parametrize("style", [FromTheWidth, FromAList])
def test_right_ones_are_ok(style: type[nn.Module]) -> None:
    part = style()
    assert off_by(part) <= 2**-8
    report = safe_rope.audit(Model(part).bfloat16())
    assert report.ok, report


@pytest.mark.parametrize("style", [CountsLow, FromAListLow])
def test_rounded_counts_are_damage(style: type[nn.Module]) -> None:
    part = style()
    assert off_by(part) > 0.5
    (finding,) = safe_rope.audit(Model(part).bfloat16()).findings
    assert (finding.severity, finding.what, finding.where) == ("damaged", "forward", "forward")
    assert finding.cos_error is not None
    assert finding.cos_error > 0.5


def sinusoids(places: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    speeds = 1e4 ** (-torch.arange(0, dim, 2).float() / dim)
    phases = places.to(dtype).float()[..., None] * speeds
    return torch.cat((phases.sin(), phases.cos()), -1)


class Asked(nn.Module):
    """``counted``: the dtype in which it counts; None for that of its activations."""

    counted: torch.dtype | None = torch.float32

    def __init__(self, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim

    def at(self, x: torch.Tensor, places: torch.Tensor, dim: int) -> torch.Tensor:
        return sinusoids(places, dim, self.counted or x.dtype).to(x.dtype)


class QueriesAndKeys(Asked):
    """Heads before places; a shape with few places fits as well."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        sin, cos = self.at(q, torch.arange(q.shape[2]), self.head_dim).chunk(2, -1)
        halves = [x.chunk(2, -1) for x in (q, k)]
        return [torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in halves]


class SequenceFirst(Asked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.at(x, torch.arange(x.shape[0]), x.shape[2])[:, None]


class HeightAndWidth(Asked):
    def forward(self, x: torch.Tensor, H: int, W: int) -> torch.Tensor:
        across = self.at(x, torch.arange(W) * 20 + 1, x.shape[1])
        return x + across.T[:, None].expand(-1, H, -1)


class Starts(Asked):
    def forward(self, x: torch.Tensor, start_pos: int) -> torch.Tensor:
        return x + self.at(x, torch.arange(start_pos, start_pos + x.shape[1]), x.shape[2])


class Lengths(Asked):
    def forward(self, x: torch.Tensor, x_lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]).clamp(max=int(x_lengths.max()))
        return x + self.at(x, places, x.shape[2])


class Packed(Asked):
    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        begins = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
        return x + self.at(x, torch.arange(x.shape[0]) - begins, x.shape[1])


class OffsetOfEach(Asked):
    """By its name a number; it is a tensor."""

    def forward(self, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return x + self.at(x, torch.arange(x.shape[1]), x.shape[2]) + offset.mean(-1, keepdim=True)


class HiddenAndWeights(Asked):
    """By their names two sides; they are activations."""

    def forward(self, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return h * w.sigmoid() + self.at(h, torch.arange(h.shape[1]), h.shape[2])


class StartOfEach(Asked):
    def forward(self, x: torch.Tensor, start_pos: torch.Tensor) -> torch.Tensor:
        return x + self.at(x, 0 * start_pos[:, :1] + torch.arange(x.shape[1]), x.shape[2])


ARGUMENTS: dict[type[Asked], tuple[tuple[int, ...], tuple[Any, ...]]] = {
    QueriesAndKeys: ((1, 4, LENGTH, 16), (torch.ones(1, 4, LENGTH, 16),)),
    SequenceFirst: ((LENGTH, 1, 8), ()),
    HeightAndWidth: ((1, 8, 30, 30), (30, 30)),
    Starts: ((1, LENGTH, 8), (0,)),
    Lengths: ((1, LENGTH, 8), (torch.tensor([LENGTH]),)),
    OffsetOfEach: ((1, LENGTH, 8), (torch.ones(1, LENGTH, 8),)),
    HiddenAndWeights: ((1, LENGTH, 8), (torch.ones(1, LENGTH, 8),)),
    StartOfEach: ((1, LENGTH, 8), (torch.zeros(1, 1, dtype=torch.int64),)),
    Packed: ((LENGTH, 8), (torch.tensor([0, LENGTH]),)),
}


def answers(part: nn.Module, shape: tuple[int, ...], others: tuple[Any, ...], dtype: torch.dtype) -> Any:
    given = [one.to(dtype) if torch.is_tensor(one) and one.is_floating_point() else one for one in others]
    answer = part(torch.ones(shape, dtype=dtype), *given)
    return torch.stack(answer) if isinstance(answer, list) else answer


@pytest.mark.parametrize("style", ARGUMENTS)
@pytest.mark.parametrize("counted", [torch.float32, None])
def test_what_a_forward_takes_is_told_by_its_names(style: type[Asked], counted: torch.dtype | None) -> None:
    part = style()
    part.counted = counted
    true, low = (answers(part, *ARGUMENTS[style], dtype) for dtype in (torch.float32, torch.bfloat16))
    is_off = float((low.float() - true).abs().max()) > 0.1
    assert is_off == (counted is None)
    report = safe_rope.audit(Model(part).bfloat16())
    assert report.verdict == ("damaged" if is_off else "ok"), report
