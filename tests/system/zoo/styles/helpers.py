"""Positions that are made by what is no module, kept by torch's own modules, or passed in dataclasses."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.names import frequencies, wave
from styles.owners import HEAD_DIM, Attention, swap_halves
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def turned_in_its_dtype(x: torch.Tensor) -> torch.Tensor:
    t = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)
    inv_freq = 1.0 / (10000 ** (torch.arange(0, x.shape[3], 2, dtype=x.dtype) / x.shape[3]))
    emb = torch.outer(t, inv_freq).repeat(1, 2)
    return x * emb.cos() + swap_halves(x) * emb.sin()


@style("helpers", "in forward", shows="output")
class CountsBesideWeights(Attention):
    """Nothing is kept; all is computed in the dtype of q and k."""

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return turned_in_its_dtype(x)


class Turner:
    """No module."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return turned_in_its_dtype(x)


@style("helpers", "object", shows="output")
class TurnedByAnObject(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Turner()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.rope(x)


class ComplexTurner:
    """Holds complex phases, and is no module."""

    def __init__(self, dim: int, length: int) -> None:
        angle = torch.outer(torch.arange(0.0, length), frequencies(dim))
        self.cis = torch.polar(torch.ones_like(angle), angle)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.cis[: x.shape[2]]).flatten(3).type_as(x)


@style("helpers", "object", "complex", shows="output")
class ComplexPhasesOfAnObject(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = ComplexTurner(HEAD_DIM, LONGEST)

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.rope(x)


@style("helpers", "torch's own", inv_freq="rope.inv_freq", exact=half_width)
class InABareModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = nn.Module()
        self.rope.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.rope.inv_freq, x)


@style("helpers", "torch's own", "embedding", inputs=hidden_and_positions)
class EmbeddingOfABuffer(nn.Module):
    """The weight of an Embedding is replaced by a buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.embed = nn.Embedding(LONGEST, dim)
        phase = torch.outer(torch.arange(LONGEST).float(), frequencies(dim))
        del self.embed.weight
        self.embed.register_buffer("weight", torch.cat((phase.sin(), phase.cos()), -1), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.embed(position_ids).to(x.dtype)


class Scriptable(nn.Module):
    """Is compiled as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("helpers", "scripted", inv_freq="rope.inv_freq", exact=half_width)
class ScriptedRope(nn.Module):
    """TorchScript holds the buffer."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.rope = torch.jit.script(Scriptable())

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


@dataclasses.dataclass
class CosAndSin:
    """Both tables by name."""

    cos: torch.Tensor
    sin: torch.Tensor


class InADataclass(nn.Module):
    """Returns cos and sin of the dtype of its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(HEAD_DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> CosAndSin:
        emb = torch.outer(torch.arange(x.shape[2]).to(self.inv_freq), self.inv_freq).repeat(1, 2)
        return CosAndSin(emb.cos(), emb.sin())


@style("helpers", "dataclass", shows="output", inv_freq="rope.inv_freq")
class ReturnsADataclass(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rope = InADataclass()

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        both = self.rope(x)
        return x * both.cos + swap_halves(x) * both.sin


@dataclasses.dataclass
class Batch:
    """Hidden states, and where they begin."""

    x: torch.Tensor
    first: int = 0


class TakesABatch(nn.Module):
    """Counts in the dtype of the hidden states, and moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, batch: Batch) -> Pair:
        t = torch.arange(batch.x.shape[1], dtype=batch.x.dtype) + batch.first
        batch.first += 100
        phase = t[:, None] * self.inv_freq.to(batch.x.dtype)
        return phase.cos(), phase.sin()


@style("helpers", "dataclass", inv_freq="rope.inv_freq")
class TakesADataclass(nn.Module):
    """Twice, the second time from where the first has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = TakesABatch()

    def forward(self, x: torch.Tensor) -> Any:
        batch = Batch(x)
        return self.rope(batch), self.rope(batch), torch.tensor(batch.first)
