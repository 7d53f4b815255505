"""Tables that a function keeps or makes: attributes, keywords, generated code, decorated methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.formulas import waves as _waves
from styles.registry import DIM, style


@style("function attribute")
class OnAnInnerFunction(nn.Module):
    """The table is an attribute of a function that the constructor defines."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()

        def rotate(x: torch.Tensor) -> Pair:
            return _turned(rotate.inv_freq, x)  # type: ignore[attr-defined]

        rotate.inv_freq = _frequencies(dim)  # type: ignore[attr-defined]
        self.rotate = rotate

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rotate(x)


@style("partial")
class KeywordsOfAPartial(nn.Module):
    """The forward's helper has got its frequencies as a keyword."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rotate = functools.partial(_turned, x=None, inv_freq=_frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rotate(x=x)


_SOURCE = """
def inverse_frequencies(dim, base):
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))

def tables(inv_freq, length):
    phase = torch.outer(torch.arange(length).float(), inv_freq.float())
    return phase.cos(), phase.sin()
"""


_generated: dict[str, Any] = {"torch": torch}


exec(_SOURCE, _generated)


@style("generated", inv_freq="inv_freq", exact=half_width)
class GeneratedCode(nn.Module):
    """Its functions are made by ``exec``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _generated["inverse_frequencies"](dim, 10000.0), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = _generated["tables"](self.inv_freq, x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


@style("callable", inv_freq="inv_freq", exact=half_width)
class MadeByAGivenCallable(nn.Module):
    """The parent hands a lambda that makes the table."""

    def __init__(self, make: Callable[[int], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.make = make or (lambda dim: torch.pow(1e4, -torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self.register_buffer("inv_freq", self.make(DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("decorated", inv_freq="inv_freq", exact=half_width)
class DecoratedForward(nn.Module):
    """``no_grad`` and a decorator of the author's around forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    @torch.no_grad()
    @functools.wraps(_turned)
    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


def remembers_its_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """As a configuration library decorates constructors."""

    @functools.wraps(init)
    def inner(self: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "arguments", {**kwargs, "args": args})
        init(self, *args, **kwargs)

    return inner


@style("decorated", inv_freq="rates", exact=half_width)
class DecoratedConstructor(nn.Module):
    """Its constructor is a wrapper that notes what it is called with."""

    @remembers_its_arguments
    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("rates", 1 / base ** (torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _waves(self.rates, x)
