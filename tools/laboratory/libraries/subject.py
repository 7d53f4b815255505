"""What the survey of other libraries builds and asks: one position module, or one small whole model."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Cast = Callable[[torch.Tensor], torch.Tensor]
"""Gives an input the dtype that the model's activations have."""
Ask = Callable[[Any, Cast], Any]

LONG = 4096
"""Positions asked for where a module takes any; phases from BF16 frequencies are then off by radians."""

FEW = 64
"""Positions that a whole model is asked for."""


@dataclass(frozen=True)
class Subject:
    """A module or a model of a library: how it is built, and what it is asked.

    Args:
        library: the distribution that it comes from.
        name: of the module or model, unique within the library.
        build: makes it, with random weights from torch's global generator.
        ask: runs it on a fixed input; every floating tensor of the result counts.
        whole: a whole model, whose results in BF16 hold many roundings; it is judged by its result in FP32.
        positions: largest position that it is asked for.

    """

    library: str
    name: str
    build: Callable[[], Any]
    ask: Ask
    whole: bool = False
    positions: int = LONG


def lib(name: str) -> Any:
    """Return a module of an installed library. Any: this environment need not have it."""
    return importlib.import_module(name)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers that BF16 can hold."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().float()


def ints(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random integers from 0 to ``high`` - 1."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def declare_torchvision_operators() -> Any:
    """Let torchvision be imported where its operators cannot be loaded; nothing here calls them.

    The wheels on PyPI are built for CUDA. What timm and open_clip import from them is Python.
    """
    operators: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators


@dataclass(frozen=True)
class Family:
    """Makes the subjects of one Python module of a library, which is imported when one is built."""

    library: str
    module: str
    whole: bool = False
    positions: int | None = None

    def __call__(self, name: str, build: Callable[[Any], Any], ask: Ask) -> Subject:
        """Return a subject; ``build`` gets the imported module."""
        largest = self.positions or (FEW if self.whole else LONG)
        return Subject(self.library, name, lambda: build(lib(self.module)), ask, self.whole, largest)

    def new(self, name: str, ask: Ask, *arguments: Any, **options: Any) -> Subject:
        """Return a subject of the class that the name ends with, before a comma; the rest is for it."""
        cls = name.partition(",")[0].split()[-1]
        return self(name, lambda module: getattr(module, cls)(*arguments, **options), ask)
