"""Frequencies in a module that has no forward, read by the module above it."""

from __future__ import annotations

import math

import torch
from torch import nn

from styles.formulas import Pair
from styles.registry import DIM, hidden_and_positions, style


class Rates(nn.Module):
    """Holds what it is given, under a name that says nothing."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", w)


@style("given", inputs=hidden_and_positions)
class PositionsInTheDtypeOfHeldFrequencies(nn.Module):
    """Counts nothing: the positions come in, and get the dtype of the frequencies."""

    def __init__(self, dim: int = DIM, base: float = 500000.0) -> None:
        super().__init__()
        self.holder = Rates(torch.exp(torch.arange(0, dim, 2) * (-math.log(base) / dim)))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        rates = self.holder.w
        phase = torch.einsum("i,j->ij", position_ids.squeeze(0).type_as(rates), rates)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("given")
class CountsInTheDtypeOfHeldFrequencies(nn.Module):
    """Counts integers, and gives them the dtype of the frequencies; not every dimension turns."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        rates = base ** -(torch.arange(0, dim // 2, 2).float() / dim)
        self.holder = Rates(torch.cat((rates, torch.zeros(dim // 4))))

    def forward(self, x: torch.Tensor) -> Pair:
        rates = self.holder.w.to(x.device)
        phase = torch.arange(x.shape[1]).type_as(rates).view(-1, 1) @ rates.view(1, -1)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)
