"""Code around a rope that reads its buffers: for numbers, for tables of its own, for kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from styles.classes import Turned
from styles.formulas import Pair, half_width
from styles.names import frequencies, wave
from styles.owners import HEAD_DIM, Attention, swap_halves
from styles.registry import DIM, LONGEST, style


@torch.library.custom_op("zoo::turn", mutates_args=(), schema="(Tensor x, Tensor cos, Tensor sin) -> Tensor")
def turn_by_a_kernel(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if cos.dtype != x.dtype:
        raise TypeError(f"cos is {cos.dtype}, x is {x.dtype}")
    return x * cos + swap_halves(x) * sin


class Phases(nn.Module):
    """Returns phases of the dtype of its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(HEAD_DIM), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).to(self.inv_freq), self.inv_freq)


@style("readers", "custom operator", shows="output", inv_freq="rope.inv_freq")
class PhasesToAKernel(Attention):
    """A registered operator wants cos and sin of the dtype of q."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> Any:
        emb = self.rope(x.shape[2]).repeat(1, 2)
        return turn_by_a_kernel(x, emb.cos(), emb.sin())


@style("readers", "constructor", inv_freq="rope.inv_freq", exact=half_width)
class ParentMakesTables(nn.Module):
    """The parent's tables are computed from the child's buffer, one of them persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Turned()
        phase = torch.outer(torch.arange(LONGEST).to(self.rope.inv_freq), self.rope.inv_freq)
        self.register_buffer("cos", phase.cos())
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


@style("readers", "constructor", shows="output", inv_freq="rope.inv_freq")
class ParentMakesAParameter(nn.Module):
    """What is trained begins as a copy of the child's buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Turned()
        self.theta = nn.Parameter(self.rope.inv_freq.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rope(x)
        return x * torch.cat((cos, sin), -1) + self.theta.sum()


class HoldsAnothers(nn.Module):
    """Gets a buffer of another module."""

    def __init__(self, inv: torch.Tensor) -> None:
        super().__init__()
        self.inv = inv

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.inv, x)


@style("readers", "handed over", inv_freq="rope.inv_freq", exact=half_width)
class HandsItsBufferOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Turned()
        self.layer = HoldsAnothers(self.rope.inv_freq)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@style("readers", "copy", inv_freq="rope.inv_freq")
class CopiesByAsTensor(nn.Module):
    """``as_tensor`` converts to the dtype that the buffer says it has."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Turned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inv = torch.as_tensor(self.rope.inv_freq).detach().clone()
        return torch.outer(torch.arange(x.shape[1]).float(), inv.float()).cos().to(x.dtype)


@style("readers", "numbers", inv_freq="rope.inv_freq")
class ReadsNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Turned()

    def forward(self, x: torch.Tensor) -> Any:
        cos, sin = self.rope(x)
        most, least = float(self.rope.inv_freq.max()), self.rope.inv_freq[-1].item()
        return cos * most, sin + 0 * least, torch.tensor(len(self.rope.inv_freq.tolist()))


@style("readers", "one frequency", shows="output", inv_freq="inv_freq")
class TurnsByOneFrequency(nn.Module):
    """A module with weights takes one of its frequencies by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = self.inv_freq[3]
        first, second = self.lin(x).chunk(2, dim=-1)
        return torch.cat((first * phase.cos() - second * phase.sin(), first * phase.sin()), dim=-1)


@style("readers", "growing", inv_freq="inv_freq")
class ExtendedByPieces(nn.Module):
    """Forward appends the rows that are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_buffer("rows", torch.zeros(0, DIM // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.rows):
            t = torch.arange(len(self.rows), x.shape[1]).to(self.inv_freq.dtype)
            self.rows = torch.cat((self.rows, torch.outer(t, self.inv_freq).sin().to(self.rows.dtype)))
        return self.rows[: x.shape[1]].to(x.dtype)
