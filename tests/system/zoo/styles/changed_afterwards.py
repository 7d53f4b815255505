"""What the script or the parent does to a module that is built: its class, its forward, its caches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from styles.classes import Turned
from styles.formulas import Pair, half_width
from styles.names import frequencies, wave
from styles.registry import DIM, LONGEST, hidden_states, style


class Halved(Turned):
    """Interpolates when it is called."""

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.inv_freq / 2, x)


@style("changed", "class", inv_freq="1.inv_freq")
def class_changed_afterwards() -> nn.Module:
    model = nn.Sequential(nn.Identity(), Turned())
    model[1].__class__ = Halved
    return model


class Patched(Turned):
    """Its class gets another forward."""

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.inv_freq, x)


_OWN = Patched.forward


def _unpatch() -> None:
    Patched.forward = _OWN  # type: ignore[method-assign]


@style("changed", "patched", inv_freq="1.inv_freq", reset=_unpatch)
def class_patched_afterwards() -> nn.Module:
    """As recipes for long contexts do it to models that are loaded."""
    model = nn.Sequential(nn.Identity(), Patched())

    def forward(self: Any, x: torch.Tensor) -> Pair:
        return wave(self.inv_freq / 4, x)

    Patched.forward = forward  # type: ignore[method-assign]
    return model


class Cached(nn.Module):
    """Makes its table anew where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.fill()

    def fill(self) -> None:
        phase = torch.outer(torch.arange(LONGEST).float() * self.factor, self.inv_freq.float())
        self.register_buffer("cos_cached", phase.cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "cos_cached", None) is None:
            self.fill()
        return self.cos_cached[: x.shape[1]].to(x.dtype)


@style("changed", "deleted", inv_freq="rope.inv_freq")
class CacheDeletedByTheParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Cached()
        self.rope.factor = 0.25
        del self.rope.cos_cached

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


@style("changed", "reset", inv_freq="rope.inv_freq")
class CacheResetByTheParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Cached()
        self.rope.factor = 0.25
        self.rope.cos_cached = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


class Extendable(nn.Module):
    """Has a method that makes its tables, of as many rows as that is asked for."""

    def __init__(self, dim: int = DIM, length: int = 64) -> None:
        super().__init__()
        self.dim = dim
        self.extend(length)

    def extend(self, length: int) -> None:
        phase = torch.arange(length).float()[:, None] * frequencies(self.dim)
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


@style("changed", "longer")
def extended_afterwards() -> nn.Module:
    model = Extendable()
    model.extend(LONGEST)
    return model


class Unfilled(nn.Module):
    """Its buffer is memory as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(DIM // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.inv_freq, x)


@style("changed", "apply", inv_freq="rope.inv_freq", exact=half_width)
class FilledByApply(nn.Module):
    """``Module.apply`` goes through the children and fills them."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Unfilled()
        self.apply(self.fill)

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        if isinstance(module, Unfilled):
            module.inv_freq.copy_(frequencies())

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


@style("changed", "traced", inv_freq="rope.inv_freq", inputs=lambda dtype, _: hidden_states(dtype, 300))
class Traced(nn.Module):
    """TorchScript traces the rope while the model is built."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.rope = torch.jit.trace(Turned(), torch.zeros(1, 300, DIM), check_trace=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)
