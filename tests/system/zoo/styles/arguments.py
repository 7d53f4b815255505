"""Constructors with unusual arguments."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, style


class Given(nn.Module):
    """Keeps the frequencies that its subclass makes."""

    def keep(self, inv_freq: torch.Tensor) -> None:
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def frequencies(dim: int, base: float) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))


class AnyArguments(Given):
    """All it takes is ``*args``."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        dim, base = args
        self.keep(frequencies(dim, base))


@style("arguments", "*args", inv_freq="inv_freq", exact=half_width)
def any_arguments() -> nn.Module:
    return AnyArguments(DIM, 31000.0)


class KeywordsPopped(Given):
    """Takes keywords one by one, and refuses what is left."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        dim, base = kwargs.pop("dim"), kwargs.pop("base", 10000.0)
        if kwargs:
            raise TypeError(f"unknown: {kwargs}")
        self.keep(frequencies(dim, base))


@style("arguments", "kwargs popped", inv_freq="inv_freq", exact=half_width)
def keywords_popped() -> nn.Module:
    return KeywordsPopped(dim=DIM, base=22222.0)


@style("arguments", "kwargs popped", inv_freq="ropes.1.inv_freq", exact=half_width)
class SameKeywordsForEveryLayer(nn.Module):
    """One dictionary for all layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        settings = {"dim": DIM, "base": 12345.0}
        self.ropes = nn.ModuleList(KeywordsPopped(**settings) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        return self.ropes[1](x)


class PositionalOnly(Given):
    """Its arguments have no names outside."""

    def __init__(self, dim: int, base: float = 10000.0, /, *, scale: float) -> None:
        super().__init__()
        self.keep(frequencies(dim, base) * scale)


@style("arguments", "positional only", inv_freq="inv_freq", exact=half_width)
def positional_only() -> nn.Module:
    return PositionalOnly(DIM, 9999.0, scale=0.5)


class FromConfig(Given):
    """Reads a config that it does not keep."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.heads
        self.keep(frequencies(int(head_dim * config.partial), config.rope["theta"]))


@style("arguments", "config", inv_freq="inv_freq", exact=half_width)
def from_a_config() -> nn.Module:
    config = SimpleNamespace(hidden_size=4 * DIM, heads=2, partial=0.5, rope={"theta": 8e4})
    return FromConfig(config)


@style("arguments", "config", "classmethod", inv_freq="inv_freq", exact=half_width)
def config_that_changes_afterwards() -> nn.Module:
    """The script uses the same config for something else later."""
    config = SimpleNamespace(hidden_size=4 * DIM, heads=2, partial=0.5, rope={"theta": 8e4})
    module = FromConfig(config)
    config.rope["theta"] = 5.0
    config.partial = 0.25
    return module


@style("arguments", "mutable default", inv_freq="inv_freq", exact=half_width)
class MutableDefault(Given):
    """Every construction writes into the default."""

    def __init__(self, dim: int = DIM, seen: list[float] = []) -> None:  # noqa: B006 as it is found
        super().__init__()
        seen.append(10000.0)
        self.keep(frequencies(dim, seen[0]))


class TensorGiven(Given):
    """Gets its frequencies ready."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.keep(inv_freq)


@style("arguments", "tensor", inv_freq="inv_freq", exact=half_width)
def tensor_given() -> nn.Module:
    steps = torch.arange(0, DIM, 2, dtype=torch.float32)
    return TensorGiven(torch.exp(-steps * (math.log(10000.0) / DIM)))


class FunctionGiven(Given):
    """Is told how to make them."""

    def __init__(self, make: Callable[[int], torch.Tensor], dim: int = DIM) -> None:
        super().__init__()
        self.keep(make(dim))


@style("arguments", "callable", inv_freq="inv_freq", exact=half_width)
def function_given() -> nn.Module:
    scale = 0.125
    return FunctionGiven(lambda dim: frequencies(dim, 10000.0) * scale)


NAMES: set[str] = set()


@style("arguments", "only once", inv_freq="inv_freq", exact=half_width, reset=NAMES.clear)
class UniqueName(Given):
    """No name may be used twice in a process."""

    def __init__(self, name: str = "rope", dim: int = DIM) -> None:
        super().__init__()
        if name in NAMES:
            raise ValueError(f"there is a rope named {name!r} already")
        NAMES.add(name)
        self.keep(frequencies(dim, 10000.0))


COUNT: list[int] = []


@style("arguments", "only once", inv_freq="ropes.1.inv_freq", exact=half_width, reset=COUNT.clear)
class NumberedLayers(nn.Module):
    """Each layer takes the next number of the process, and a base by that."""

    class Numbered(Given):
        """Its base follows from how many there were before."""

        def __init__(self) -> None:
            super().__init__()
            COUNT.append(len(COUNT))
            self.keep(frequencies(DIM, 10.0 ** (3 + COUNT[-1])))

    def __init__(self) -> None:
        super().__init__()
        self.ropes = nn.ModuleList(self.Numbered() for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.ropes[1](x)


class Knows(Given):
    """Is handed its parent, whose settings are not complete yet."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.keep(frequencies(parent.settings["dim"], parent.settings.pop("base")))


@style("arguments", "parent", inv_freq="rope.inv_freq", exact=half_width)
class HandsItselfOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"dim": DIM, "base": 65000.0}
        self.rope = Knows(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


class KeepsDim(Given):
    """Says of itself its dim, and not its base."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.keep(frequencies(dim, base))


class WithARope(nn.Module):
    """Is given a rope that was made long ago."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


TEMPLATE = KeepsDim(DIM, base=5e5)


@style("arguments", "copied", inv_freq="rope.inv_freq", exact=half_width)
def copied_from_a_template() -> nn.Module:
    """No constructor of the rope runs while the model is built."""
    return WithARope(copy.deepcopy(TEMPLATE))


@style("arguments", "unpickled", inv_freq="rope.inv_freq", exact=half_width)
def unpickled() -> nn.Module:
    return WithARope(pickle.loads(pickle.dumps(TEMPLATE)))


@style("arguments", "loaded", inv_freq="inv_freq", exact=half_width, not_on=("meta",))
def loaded_from_a_state_dict() -> nn.Module:
    """What a file brings in full precision wins over what the constructor has made."""
    module = Saved()
    module.load_state_dict({"inv_freq": TEMPLATE.inv_freq / 2})
    return module


class Saved(Given):
    """Its frequencies are in its files."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(dim, 10000.0))
