"""What the harness has to know of a style: how it is built and called, and what it should give.

A style is a position module, or a small model around one, as somebody would write it. `style` registers a
class or a factory that can be called without arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

DIM = 32
HALF = DIM // 2
LENGTHS = (300, 600)
"""The lengths of two forwards after each other: BF16 cannot count so far, and what grows has to grow."""
LONGEST = 640
"""How many rows a table has that is made once."""

Arguments = tuple[Any, ...]
Reader = Callable[[nn.Module], Any]
Factory = TypeVar("Factory", bound=Callable[..., Any])


@dataclass(frozen=True)
class Style:
    """One way of writing a position module.

    Attributes:
        name: unique; the name of the class or factory.
        make: builds the module or model.
        tags: what is particular about it; ``"unharmed"``: no cast, default dtype or device changes it.
        inputs: the arguments of forward for a dtype and a length.
        inv_freq: reads the frequencies that the module holds; None where it holds none to be read.
        exact: for the FP32 frequencies and a length what forward gives, in float64, by a formula.
        shows: ``"tables"``: forward returns what is applied (cos and sin, phases, a bias). ``"output"``:
            only what a model computes from that can be seen.
        roundings: how many roundings the stock code makes after the trigonometry, in a low dtype.
        widens: forward takes a finished table in the dtype that it is kept in, and returns it as FP32.
        not_on: names of the load paths on which nothing can be said of it.
        reset: forgets what is remembered outside of the module.

    """

    name: str
    make: Callable[[], nn.Module]
    tags: frozenset[str]
    inputs: Callable[[torch.dtype, int], Arguments]
    inv_freq: Reader | None
    exact: Callable[[torch.Tensor, int], Any] | None
    shows: Literal["tables", "output"]
    roundings: int
    widens: bool
    not_on: frozenset[str]
    reset: Callable[[], Any]


STYLES: dict[str, Style] = {}


def style(
    *tags: str,
    inputs: Callable[[torch.dtype, int], Arguments] | None = None,
    inv_freq: str | Reader | None = None,
    exact: Callable[[torch.Tensor, int], Any] | None = None,
    shows: Literal["tables", "output"] = "tables",
    roundings: int = 1,
    widens: bool = False,
    not_on: tuple[str, ...] = (),
    reset: Callable[[], Any] = lambda: None,
) -> Callable[[Factory], Factory]:
    """Register what is decorated under its name; the arguments are `Style`'s."""

    def register(factory: Factory) -> Factory:
        name = factory.__name__
        if name in STYLES:
            raise ValueError(f"two styles are called {name}")
        STYLES[name] = Style(
            name=name,
            make=factory,
            tags=frozenset(tags),
            inputs=inputs or hidden_states,
            inv_freq=attribute(inv_freq) if isinstance(inv_freq, str) else inv_freq,
            exact=exact,
            shows=shows,
            roundings=roundings,
            widens=widens,
            not_on=frozenset(not_on),
            reset=reset,
        )
        return factory

    return register


def attribute(path: str) -> Reader:
    """Return a reader of a dotted path of attributes, list indices and dictionary keys."""

    def read(module: Any) -> Any:
        value = module
        for part in path.split("."):
            if isinstance(value, list | tuple | nn.ModuleList | nn.ParameterList):
                value = value[int(part)]
            elif isinstance(value, dict | nn.ModuleDict):
                value = value[part]
            else:
                value = getattr(value, part)
        return value

    return read


def hidden_states(dtype: torch.dtype, length: int) -> Arguments:
    """Hidden states [1, length, DIM] that BF16 and FP16 hold without rounding."""
    steps = torch.arange(length * DIM, dtype=torch.int64).reshape(1, length, DIM)
    return (((steps * 37) % 17 - 8).to(dtype) / 8,)


def hidden_and_positions(dtype: torch.dtype, length: int) -> Arguments:
    """Hidden states, and positions [1, length] as integers."""
    return (*hidden_states(dtype, length), torch.arange(length)[None])
