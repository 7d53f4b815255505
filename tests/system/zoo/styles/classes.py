"""Code that asks for a module's class, makes another one of it, or hears of every class that is derived."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.names import frequencies, wave
from styles.registry import DIM, style

KINDS: dict[str, Any] = {}


class Turned(nn.Module):
    """Turns by its frequencies."""

    def __init__(self, dim: int = DIM, base: float = 1e4) -> None:
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.inv_freq, x)


class Registered(Turned):
    """Every class that is derived goes into a registry."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        KINDS[cls.__name__] = cls


class LinearKind(Registered):
    """Built by its name."""


@style("classes", "registry", inv_freq="ropes.1.inv_freq")
class FromARegistry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ropes = nn.ModuleList()
        for base in (1e4, 5e5):
            self.ropes.append(KINDS["LinearKind"](DIM, base))

    def forward(self, x: torch.Tensor) -> Any:
        return [rope(x) for rope in self.ropes]


class Recording(type(nn.Module)):  # type: ignore[misc]
    """A metaclass that takes each name once."""

    seen: dict[str, type] = {}

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        if name in Recording.seen:
            raise ValueError(f"there is a class {name} already")
        Recording.seen[name] = cls


@style("classes", "registry", "metaclass", inv_freq="inv_freq", exact=half_width)
class RecordedOnce(Turned, metaclass=Recording):
    pass


class NeedsAKind(Turned):
    """No class may be derived without saying of which kind it is."""

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


@style("classes", "registry", inv_freq="inv_freq", exact=half_width)
class OfAKind(NeedsAKind, kind="rope"):
    pass


@style("classes", "super", inv_freq="inv_freq", exact=half_width)
class SuperOfItsClass(Turned):
    """As beginners write it."""

    def __init__(self) -> None:
        super(self.__class__, self).__init__()

    def forward(self, x: torch.Tensor) -> Pair:
        return super(type(self), self).forward(x)


@style("classes", "clone", inv_freq="inv_freq")
class LongerOneOfItsClass(nn.Module):
    """A longer sequence is answered by a longer one of the same class."""

    def __init__(self, length: int = 320) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        phase = torch.outer(torch.arange(length).float(), self.inv_freq)
        self.register_buffer("cos", phase.cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[1] > len(self.cos):
            return type(self)(x.shape[1])(x)
        return self.cos[: x.shape[1]].to(x.dtype)


@style("classes", "clone", inv_freq="rope.inv_freq")
class SecondLikeTheFirst(nn.Module):
    """The second rope has the class of the first, which is protected by then."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Turned()
        self.other = type(self.rope)(DIM, 5e5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x), self.other(x)


@style("classes", "sealed", inv_freq="inv_freq", exact=half_width)
class RefusesChanges(Turned):
    """Nothing can be set once it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("sealed"):
            raise AttributeError(f"{name} cannot be set: it is sealed")
        super().__setattr__(name, value)
