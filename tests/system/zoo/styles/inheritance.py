"""Rotary modules by inheritance: subclasses, mixins, factories, metaclasses."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width, neighbours
from styles.registry import DIM, style


class Rope(nn.Module):
    """What the others derive from."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", self.compute(), persistent=False)

    def compute(self) -> torch.Tensor:
        return 1.0 / (self.base ** (torch.arange(0, self.dim, 2).float() / self.dim))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("inheritance", "overridden", inv_freq="inv_freq", exact=half_width)
class OverriddenFormula(Rope):
    """The base class's constructor calls the subclass's formula, with an attribute set before super."""

    def __init__(self, dim: int = DIM, factor: float = 2.0) -> None:
        object.__setattr__(self, "factor", factor)
        super().__init__(dim, base=20000.0)

    def compute(self) -> torch.Tensor:
        return super().compute() / self.factor


@style("inheritance", "overridden", inv_freq="inv_freq", exact=neighbours)
class OverriddenForward(Rope):
    """Neighbouring channels turn together here."""

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = super().forward(x.float())
        return cos.repeat_interleave(2, dim=-1).to(x.dtype), sin.repeat_interleave(2, dim=-1).to(x.dtype)


class FrequencyMixin:
    """Knows the frequencies and nothing else; it is no module."""

    theta = 30000.0

    def make_frequencies(self, dim: int) -> None:
        inv_freq = self.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", inv_freq)  # type: ignore[attr-defined]

    def angles(self, x: torch.Tensor) -> torch.Tensor:
        inv_freq: torch.Tensor = self.inv_freq  # type: ignore[attr-defined]
        return torch.arange(x.shape[1]).float()[:, None] * inv_freq.float()


@style("inheritance", "mixin", inv_freq="inv_freq", exact=half_width)
class MixedIn(FrequencyMixin, nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        nn.Module.__init__(self)
        self.make_frequencies(dim)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.angles(x).cos().to(x.dtype), self.angles(x).sin().to(x.dtype)


class CooperativeRope(nn.Module):
    """Takes its own keywords and hands the rest on."""

    def __init__(self, *, rope_dim: int, rope_base: float = 10000.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        steps = torch.arange(0, rope_dim, 2).float() / rope_dim
        self.register_buffer("inv_freq", 1.0 / rope_base**steps, persistent=False)


class CooperativeProjection(nn.Module):
    """The other parent."""

    def __init__(self, *, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.projection = nn.Linear(width, width, bias=False)


@style("inheritance", "two parents", inv_freq="inv_freq", exact=half_width)
class TwoParents(CooperativeRope, CooperativeProjection):
    def __init__(self) -> None:
        super().__init__(rope_dim=DIM, rope_base=1234.0, width=DIM)

    def forward(self, x: torch.Tensor) -> Pair:
        x = self.projection(x)
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def rope_class(base: float) -> type[nn.Module]:
    """Make a class for a base, which its constructor has from here."""

    class MadeByAFunction(nn.Module):
        """Its base is in a closure."""

        def __init__(self, dim: int) -> None:
            super().__init__()
            steps = torch.arange(0, dim, 2).float() / dim
            self.register_buffer("inv_freq", base**-steps, persistent=False)

        def forward(self, x: torch.Tensor) -> Pair:
            phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
            return phase.cos().to(x.dtype), phase.sin().to(x.dtype)

    return MadeByAFunction


@style("inheritance", "factory", inv_freq="inv_freq", exact=half_width)
def class_from_a_factory() -> nn.Module:
    return rope_class(4e4)(DIM)


@style("inheritance", "type()", inv_freq="inv_freq", exact=half_width)
def class_from_type() -> nn.Module:
    """A class that no class statement has made."""

    def __init__(self: Any, dim: int) -> None:  # noqa: N807
        nn.Module.__init__(self)
        steps = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", torch.pow(10000.0, -steps))

    made: Any = type("MadeByType", (Rope,), {"__init__": __init__})
    return made(DIM)


@style("inheritance", "partial", inv_freq="ropes.1.inv_freq", exact=half_width)
def built_by_a_partial() -> nn.Module:
    """Layers are built by a partial that the model was given."""

    class Layers(nn.Module):
        """Builds its ropes by whatever it is given."""

        def __init__(self, rope: Any) -> None:
            super().__init__()
            self.ropes = nn.ModuleList(rope(dim=DIM) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.ropes[1](x)

    return Layers(functools.partial(Rope, base=77777.0))


class Registering(type(nn.Module)):  # type: ignore[misc]
    """A metaclass that gives every instance what its class says."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__call__(*args, **kwargs)
        instance.inv_freq = instance.inv_freq * cls.factor
        return instance


@style("inheritance", "metaclass", inv_freq="inv_freq", exact=half_width)
class FinishedByItsMetaclass(Rope, metaclass=Registering):
    factor = 0.25


class Template(nn.Module, abc.ABC):
    """The steps are the subclass's; the order is this class's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inv_freq = self.scale(1.0 / 10000.0 ** (torch.arange(0, dim, 2) / dim))

    @abc.abstractmethod
    def scale(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """Return what is kept."""

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("inheritance", "abstract", inv_freq="inv_freq", exact=half_width)
class FromATemplate(Template):
    def __init__(self, dim: int = DIM, factor: int = 3) -> None:
        self.__dict__["factor"] = factor
        super().__init__(dim)

    def scale(self, inv_freq: torch.Tensor) -> torch.Tensor:
        return inv_freq / self.factor


@style("inheritance", "__new__", inv_freq="inv_freq", exact=half_width)
class ChosenInNew(nn.Module):
    """Asked for, another class comes out."""

    def __new__(cls, kind: str = "linear") -> Any:
        return super().__new__(LinearKind if cls is ChosenInNew and kind == "linear" else cls)

    def __init__(self, kind: str = "linear") -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.factor() / 1e4 ** (torch.arange(0, DIM, 2).float() / DIM))

    def factor(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class LinearKind(ChosenInNew):
    """Interpolated."""

    def factor(self) -> float:
        return 0.5


@style("inheritance", "dataclass", inv_freq="inv_freq", exact=half_width)
@dataclass(eq=False)
class ModuleAsADataclass(nn.Module):
    """Its constructor is generated; what makes the table is ``__post_init__``."""

    dim: int = DIM
    base: float = 10000.0

    def __post_init__(self) -> None:
        super().__init__()
        steps = torch.arange(0, self.dim, 2).float() / self.dim
        self.register_buffer("inv_freq", 1.0 / self.base**steps)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class GivenByItsSubclass(nn.Module):
    """Registers what its subclass has computed."""

    def __init__(self, rates: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("rates", rates, persistent=False)


class Settings:
    """A config."""

    head_dim, rope_theta = DIM, 500000.0


@style("inheritance")
class ComputedBeforeItsBase(GivenByItsSubclass):
    """Binds its argument anew and computes before the constructor of its base runs."""

    def __init__(self, config: type[Settings] | Settings | None = None) -> None:
        config = config or Settings()
        dim = config.head_dim
        super().__init__(1.0 / torch.logspace(0, (dim - 2) / dim, dim // 2, base=config.rope_theta))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).float()[:, None] * self.rates
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)
