"""What is no argument: settings that hold while the model is built."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, style


def frequencies(dim: int, base: float) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))


class Turned(nn.Module):
    """Turns by the frequencies that it holds."""

    inv_freq: torch.Tensor

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


SETTINGS = {"base": 10000.0}


@contextlib.contextmanager
def base_is(value: float) -> Iterator[None]:
    before, SETTINGS["base"] = SETTINGS["base"], value
    try:
        yield
    finally:
        SETTINGS["base"] = before


class ReadsAGlobal(Turned):
    """Its base is that of the moment."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(dim, SETTINGS["base"]), persistent=False)


@style("settings", "global", inv_freq="inv_freq", exact=half_width)
def global_while_building() -> nn.Module:
    with base_is(250000.0):
        return ReadsAGlobal()


@style("settings", "global", "parent", inv_freq="rope.inv_freq", exact=half_width)
class GlobalWhileTheParentBuilds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with base_is(400000.0):
            self.rope = ReadsAGlobal()

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


BASE: contextvars.ContextVar[float] = contextvars.ContextVar("BASE", default=10000.0)


class ReadsAContext(Turned):
    """Its base is the context's."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.inv_freq = frequencies(dim, BASE.get())


@style("settings", "context variable", inv_freq="inv_freq", exact=half_width)
def context_variable() -> nn.Module:
    token = BASE.set(33333.0)
    try:
        return ReadsAContext()
    finally:
        BASE.reset(token)


class ReadsTheEnvironment(Turned):
    """Its base comes from the environment."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        base = float(os.environ.get("ZOO_ROPE_BASE", "10000"))
        self.register_buffer("inv_freq", frequencies(dim, base))


@style("settings", "environment", inv_freq="inv_freq", exact=half_width)
def environment_while_building() -> nn.Module:
    os.environ["ZOO_ROPE_BASE"] = "123000"
    try:
        return ReadsTheEnvironment()
    finally:
        del os.environ["ZOO_ROPE_BASE"]


class ReadsItsClass(Turned):
    """Its base is the class's."""

    base: ClassVar[float] = 10000.0

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(dim, self.base))


@style("settings", "class attribute", inv_freq="inv_freq", exact=half_width)
def class_attribute_while_building() -> nn.Module:
    """A script changes the class, builds, and puts the class back."""
    before, ReadsItsClass.base = ReadsItsClass.base, 1e7
    try:
        return ReadsItsClass()
    finally:
        ReadsItsClass.base = before


@style("settings", "function replaced", inv_freq="inv_freq", exact=half_width)
def function_replaced_while_building() -> nn.Module:
    """A monkey patch that holds for the model only."""
    global frequencies
    before = frequencies
    frequencies = lambda dim, base: before(dim, base) / 16  # noqa: E731
    try:
        return ReadsItsClass()
    finally:
        frequencies = before


@style("settings", "default dtype", inv_freq="inv_freq", exact=half_width)
class ForcesFp32WhileBuilding(Turned):
    """Knows of the default dtype and sets it for the table."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
        torch.set_default_dtype(before)
        self.register_buffer("inv_freq", inv_freq, persistent=False)


@style("settings", "default dtype", "rounded on purpose")
class RoundedToTheDefaultDtype(nn.Module):
    """M2M100's: the table is cast to the default dtype of the model that is built."""

    def __init__(self, dim: int = DIM, length: int = 640) -> None:
        super().__init__()
        angle = torch.arange(length, dtype=torch.int64).float()[:, None] * frequencies(dim, 10000.0)
        weights = torch.cat((angle.sin(), angle.cos()), dim=1)
        self.register_buffer("weights", weights.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights[: x.shape[1]].to(x.dtype)


@style("settings", "inference mode", inv_freq="inv_freq", exact=half_width)
class MadeInInferenceMode(Turned):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        with torch.inference_mode():
            inv_freq = frequencies(dim, 10000.0)
        self.register_buffer("inv_freq", inv_freq.clone(), persistent=False)


@style("mode", inv_freq="inv_freq", exact=half_width)
class OnAnotherDeviceContext(nn.Module):
    """Its constructor asks for the CPU, whatever is the default device."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)
