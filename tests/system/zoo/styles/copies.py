"""Tables that are other tensors: copies, views, one of two names, results of a parametrization."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, HALF, LONGEST, style


class Unchanged(nn.Module):
    """A parametrization that changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x


@style("parametrized", inv_freq="inv_freq", exact=half_width)
class ParametrizedWhileBuilt(nn.Module):
    """Its buffer is what a parametrization makes of another one."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))
        parametrize.register_parametrization(self, "inv_freq", Unchanged())

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class Doubled(nn.Module):
    """A parametrization that doubles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@style("parametrized", inv_freq="rope.inv_freq", exact=half_width)
class ParametrizedByItsParent(nn.Module):
    """The parent registers a parametrization on its child's frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = PlainRope()
        parametrize.register_parametrization(self.rope, "inv_freq", Doubled())

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope(x)


class PlainRope(nn.Module):
    """Frequencies in a buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("copied", inv_freq="copy.inv_freq", exact=half_width)
class CopiesItsTables(nn.Module):
    """One child's buffer is a clone of another's, taken when the parent is built."""

    def __init__(self) -> None:
        super().__init__()
        self.rope, self.copy = PlainRope(), Emptied()
        self.copy.inv_freq = self.rope.inv_freq.clone()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.copy(x)


class Emptied(nn.Module):
    """Has a buffer that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", None, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("copies", inv_freq="layers.1.inv_freq", exact=half_width)
class ClonesOfALayer(nn.Module):
    """``_get_clones``: a layer that holds a table itself is copied before it is anybody's."""

    def __init__(self) -> None:
        super().__init__()
        layer = Turning()
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Pair:
        return self.layers[1](x)


class Turning(nn.Module):
    """Frequencies in a buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("copies", inv_freq="ema.rope.inv_freq", exact=half_width)
class CopyOfItsParent(nn.Module):
    """An average of weights: a finished model is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.online = OneLayer()
        self.ema = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.ema(x)


class OneLayer(nn.Module):
    """A rotary module and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rope, self.mix = Turning(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope(x)


@style("nested", "shared", inv_freq="a.inv_freq", exact=half_width)
class OneTableInTwoModules(nn.Module):
    """Two children hold the same buffer object."""

    def __init__(self) -> None:
        super().__init__()
        table = _frequencies()
        self.a, self.b = Given(table), Given(table)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.a(x)[0], self.b(x)[1]


class Given(nn.Module):
    """Registers what it is given."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", table, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("views", inv_freq="inv_freq", exact=half_width)
class AViewOfALongerTable(nn.Module):
    """Frequencies are a strided view of a table of twice as many."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("all_freqs", _frequencies(2 * dim), persistent=False)
        self.register_buffer("inv_freq", self.all_freqs[::2], persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("expanded")
class ExpandedByHeads(nn.Module):
    """A table is expanded over heads, which have it in common."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.register_buffer("cos", phase.cos()[None].expand(4, -1, -1), persistent=False)
        self.register_buffer("sin", phase.sin()[None].expand(4, -1, -1), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[:, : x.shape[1]].to(x.dtype), self.sin[:, : x.shape[1]].to(x.dtype)


@style("one buffer")
class ViewsOfOneBuffer(nn.Module):
    """Frequencies and positions are views of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.cat((_frequencies(), torch.arange(LONGEST).float()))
        self.register_buffer("constants", both, persistent=False)

    @property
    def rates(self) -> torch.Tensor:
        return self.constants[:HALF]

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.constants[HALF : HALF + x.shape[1], None].float() * self.rates.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)
