"""A forward that is no function of its class: static, a class's, a descriptor, one of several by type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, rates, turned
from styles.registry import DIM, style


@style(not_on=("wrapped",))
class IsStatic(nn.Module):
    """Takes nothing of the module; computes in the dtype of what it is given."""

    @staticmethod
    def forward(x: torch.Tensor) -> Pair:
        return turned(x, (10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)).to(x.dtype))


@style()
class IsItsClasss(nn.Module):
    """Takes the base of the class."""

    base = 500000.0

    @classmethod
    def forward(cls, x: torch.Tensor) -> Pair:
        return turned(x, cls.base ** (-torch.arange(0, DIM, 2).to(x.dtype) / DIM))


class Bound:
    """Gives a function for a module."""

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else lambda x: turned(x, module.inv_freq)


@style()
class IsADescriptor(nn.Module):
    """Has a forward that is made whenever it is looked up."""

    forward: Callable[..., Any] = Bound()  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates())


@style()
class IsOneOfSeveral(nn.Module):
    """Chooses by the class of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rates())

    @functools.singledispatchmethod
    def forward(self, x: Any) -> Pair:
        raise TypeError(f"expected a tensor, got {type(x).__name__}")

    @forward.register
    def _(self, x: torch.Tensor) -> Pair:
        return turned(x, self.inv_freq)
