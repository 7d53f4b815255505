"""Dtypes as arguments, and tables that a child keeps in them for whoever reads them."""

from __future__ import annotations

import torch
from torch import nn

from styles.formulas import Pair, rates
from styles.registry import DIM, style


class CountsInADtype(nn.Module):
    """Counts in the dtype that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", rates())

    def forward(self, count: int, dtype: torch.dtype) -> Pair:
        phase = torch.outer(torch.arange(count, dtype=dtype), self.rates.to(dtype))
        return phase.cos(), phase.sin()


class HoldsNothing(nn.Module):
    """Computes all of it in the dtype that it is given."""

    def forward(self, count: int, *, dtype: torch.dtype) -> Pair:
        f = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=dtype) / DIM)
        phase = torch.outer(torch.arange(count, dtype=dtype), f)
        return phase.cos(), phase.sin()


@style()
class GivesADtype(nn.Module):
    """Says in which dtype its children are to count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CountsInADtype(), HoldsNothing()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *self.first(x.shape[1], x.dtype), *self.second(x.shape[1], dtype=x.dtype)


class RoundsLast(nn.Module):
    """Rounds to the dtype that it is given, and says which that is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)

    def forward(self, count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.dtype]:
        return torch.outer(torch.arange(count).float(), self.inv_freq).cos().to(dtype), dtype


@style()
class GivesSeveralDtypes(nn.Module):
    """Asks for one table in several dtypes; each comes in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = RoundsLast()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            table, said = self.rotary(x.shape[1], dtype)
            if (table.dtype, said) != (dtype, dtype):
                raise TypeError(f"asked for {dtype}, got {table.dtype} and {said}")
        result: torch.Tensor = self.rotary(x.shape[1], dtype=x.dtype)[0]
        return result


class KeepsCosAndSin(nn.Module):
    """Keeps tables in the dtype of the last call, as FlashAttention's rotary embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates(), persistent=False)
        self.cos: torch.Tensor | None = None
        self.length = 0

    def update(self, length: int, dtype: torch.dtype) -> None:
        if self.cos is None or length > self.length or self.cos.dtype != dtype:
            phase = torch.outer(torch.arange(length, dtype=torch.float32), self.inv_freq.float())
            self.cos, self.sin, self.length = phase.cos().to(dtype), phase.sin().to(dtype), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.update(x.shape[1], x.dtype)
        return self.sin[: x.shape[1]]


@style()
class ReadsWhatIsKept(nn.Module):
    """Reads a table that the forward of its child keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = KeepsCosAndSin()

    def forward(self, x: torch.Tensor) -> Pair:
        sin = self.rotary(x)
        return self.rotary.cos[: x.shape[1]], sin


@style()
class UpdatesAndReads(nn.Module):
    """Has its child make tables longer, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = KeepsCosAndSin()

    def forward(self, x: torch.Tensor) -> Pair:
        self.rotary.update(x.shape[1], x.dtype)
        return self.rotary.cos[: x.shape[1]], self.rotary.sin[: x.shape[1]]


class KeepsOneForEachLength(nn.Module):
    """Keeps a pair for each length in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", rates())
        self.cache: dict[int, Pair] = {}

    def tables(self, length: int) -> Pair:
        if length not in self.cache:
            phase = torch.outer(torch.arange(length).type_as(self.rates), self.rates)
            self.cache[length] = phase.cos(), phase.sin()
        return self.cache[length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@style()
class AsksForALength(nn.Module):
    """Asks a method of its child, which remembers, for a length."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = KeepsOneForEachLength()

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.rotary.tables(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


class BuildsWhenTold(nn.Module):
    """Registers its tables when it is told to, and hands them out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", rates())

    def build(self, length: int) -> None:
        phase = torch.outer(torch.arange(length).type_as(self.rates), self.rates)
        self.register_buffer("c", phase.cos(), persistent=False)
        self.register_buffer("s", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.c.to(x.dtype), self.s.to(x.dtype)


@style()
class TellsItToBuild(nn.Module):
    """Tells its child to build, then calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = BuildsWhenTold()

    def forward(self, x: torch.Tensor) -> Pair:
        self.rotary.build(x.shape[1])
        tables: Pair = self.rotary(x)
        return tables
