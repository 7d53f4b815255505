"""Positions that go out by another way than as a result, or come in by another way than a constructor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width, rates, turned
from styles.formulas import frequencies as _frequencies
from styles.registry import DIM, style


class Holds(nn.Module):
    """Holds frequencies of the usual base."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)


class FillsADictionary(Holds):
    """Puts cos and sin into the dictionary that it is given."""

    def forward(self, x: torch.Tensor, context: dict[str, torch.Tensor]) -> None:
        context["cos"], context["sin"] = turned(x, self.inv_freq)


@style()
class ThroughADictionary(nn.Module):
    """Has a child fill a dictionary, as blocks of a model that share what was made for one call."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = FillsADictionary()

    def forward(self, x: torch.Tensor) -> Pair:
        context: dict[str, torch.Tensor] = {}
        self.rotary(x, context)
        return context["cos"], context["sin"]


class FillsAList(Holds):
    """Appends cos and sin to the list that it is given."""

    def forward(self, x: torch.Tensor, made: list[torch.Tensor]) -> None:
        made += turned(x, self.inv_freq)


@style()
class ThroughAList(nn.Module):
    """Has a child fill a list."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = FillsAList()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made: list[torch.Tensor] = []
        self.rotary(x, made)
        return tuple(made)


class IsAwaited(Holds):
    """Returns a coroutine."""

    async def forward(self, x: torch.Tensor) -> Pair:
        return turned(x, self.inv_freq)


@style()
class Awaits(nn.Module):
    """Runs the coroutine that its child returns."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = IsAwaited()

    def forward(self, x: torch.Tensor) -> Any:
        try:
            self.rotary(x).send(None)
        except StopIteration as ended:
            return ended.value


class TurnsByWhatItHolds(Holds):
    """Is of one base, until somebody fills it with another."""

    def forward(self, x: torch.Tensor) -> Pair:
        return turned(x, self.inv_freq)


@style()
class FilledBeforeItIsRegistered(nn.Module):
    """Fills each child with a base of its own, in place, before it becomes a child."""

    def __init__(self) -> None:
        super().__init__()
        self.ropes = nn.ModuleList()
        for base in (10000.0, 500000.0):
            rope = TurnsByWhatItHolds()
            rope.inv_freq.copy_(rates(base))
            self.ropes.append(rope)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(table for rope in self.ropes for table in rope(x))


@style("hooks", inv_freq="rope.inv_freq", exact=half_width)
class TablesByAForwardHook(nn.Module):
    """A forward hook of its child turns phases into cos and sin."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases()
        self.rope.register_forward_hook(lambda module, args, out: (out.cos(), out.sin()))

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.rope(x)
        return cos.to(x.dtype), sin.to(x.dtype)


class Phases(nn.Module):
    """Phases in FP32."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
