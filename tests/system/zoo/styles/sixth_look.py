"""Styles of a sixth look: numbers out of tensors, logarithms, copies while a guard is open, generators."""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def _frequencies(dim: int = DIM) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def _turned(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    phase = torch.outer(torch.arange(x.shape[1], device=x.device).float(), inv_freq.float())
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("lists")
class ListOfADefaultDtype(nn.Module):
    """A list of what is computed in the default dtype."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.freqs = (1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)).tolist()

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(torch.tensor(self.freqs, dtype=torch.float32), x)


@style("lists")
class NumberOfADefaultDtype(nn.Module):
    """A ratio of two numbers of a tensor in the default dtype."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        scale = 10000 ** (torch.arange(0, dim, 2) / dim)
        self.ratio = float(scale[0] / scale[1])
        self.count = dim // 2

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.ratio ** torch.arange(self.count, dtype=torch.float32), x)


@style("logarithm", inv_freq="inv_freq", exact=half_width)
class ByALogarithmInTorch(nn.Module):
    """``exp`` of a logarithm that torch takes."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        base = torch.tensor(10000.0, dtype=torch.float32)
        inv_freq = torch.exp(-torch.log(base) * torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("logarithm")
class DivTermByALogarithm(nn.Module):
    """The tutorial's, with a logarithm that torch takes, under its usual name."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.float32)
        self.register_buffer("div_term", torch.exp(steps * (-torch.log(torch.tensor([1e4])) / dim)))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.div_term, x)


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


@style("dataclass", "nested")
class InADataclassWithAList(nn.Module):
    """A dataclass keeps tables of several resolutions in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cached([_frequencies() / scale for scale in (1, 2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part for table in self.cache.tables for part in _turned(table, x))


@dataclass
class Cached:
    """Tables, and a name."""

    tables: list[torch.Tensor] = field(default_factory=list)
    name: str = "rope"


@style("generator")
class FromAGeneratorFunction(nn.Module):
    """Frequencies are yielded one after the other."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(list(self._series(dim))), persistent=False)

    @staticmethod
    def _series(dim: int) -> Iterator[float]:
        value = 1.0
        for _ in range(dim // 2):
            yield value
            value *= 10000.0 ** (-2.0 / dim)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("operators", inv_freq="inv_freq", exact=half_width)
class ByTheOperatorModule(nn.Module):
    """``operator.pow`` and ``functools.reduce``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = operator.truediv(torch.arange(0, dim, 2, dtype=torch.float32), dim)
        parts = [operator.pow(10000.0, operator.neg(steps)), torch.ones(dim // 2)]
        self.register_buffer("inv_freq", functools.reduce(operator.mul, parts), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


_OWNERS: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


@style("weakref")
class InAWeakDictionary(nn.Module):
    """Its frequencies are in a weak dictionary of the file."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        _OWNERS[self] = _frequencies(dim)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(_OWNERS[self], x)


@style("complex", "pairs")
class ConjugatePhasors(nn.Module):
    """Complex phases and their conjugates in one buffer of double precision."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(LONGEST, dtype=torch.float64), _frequencies(dim).double())
        cis = torch.polar(torch.ones_like(angle), angle)
        self.cis = torch.stack((cis, cis.conj().resolve_conj()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.cis[:, : x.shape[1]]).to(x.dtype)


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


@style("mode", inv_freq="inv_freq", exact=half_width)
class OnAnotherDeviceContext(nn.Module):
    """Its constructor asks for the CPU, whatever is the default device."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("names")
class ThroughAlias(nn.Module):
    """``import torch as t`` in a helper; tables are called ``a`` and ``b``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        t = torch
        phase = t.arange(LONGEST, dtype=t.float32)[:, None] * _frequencies(dim)
        self.register_buffer("a", t.cos(phase), persistent=False)
        self.register_buffer("b", t.sin(phase), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.a[: x.shape[1]].to(x.dtype), self.b[: x.shape[1]].to(x.dtype)


@style("axes", inputs=hidden_and_positions)
class SharedByThreeAxes(nn.Module):
    """A 3-D rope whose axes take turns through the channels."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.register_buffer("axis_of", torch.arange(dim // 2) % 3, persistent=False)
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        p = position_ids[0]
        grid = torch.stack((p // 100, (p // 10) % 10, p % 10), -1).float()
        phase = grid[:, self.axis_of] * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("state dict", inv_freq="inv_freq", exact=half_width)
class RenamesOnLoad(nn.Module):
    """A load hook renames an old key of its table."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "freqs" in state_dict:
            state_dict[prefix + "inv_freq"] = state_dict.pop(prefix + "freqs")

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("callable", inv_freq="inv_freq", exact=half_width)
class MadeByAGivenCallable(nn.Module):
    """The parent hands a lambda that makes the table."""

    def __init__(self, make: Callable[[int], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.make = make or (lambda dim: torch.pow(1e4, -torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self.register_buffer("inv_freq", self.make(DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("numpy", "float16 on purpose")
class HalfInNumpy(nn.Module):
    """Its author rounds a NumPy table to float16 and keeps that."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = np.outer(np.arange(LONGEST), 1e4 ** -(np.arange(0, dim, 2) / dim))
        table = np.concatenate((np.cos(phase), np.sin(phase)), 1).astype(np.float16)
        self.register_buffer("table", torch.from_numpy(table), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


@style("numpy", "counts")
class CountsOfNumpy(nn.Module):
    """Positions are a range of NumPy's under a plain name; frequencies are Python's."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("r", torch.from_numpy(np.arange(LONGEST, dtype=np.float32)), persistent=False)
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Pair:
        inv = torch.tensor([1e4 ** (-i / self.dim) for i in range(0, self.dim, 2)], dtype=torch.float32)
        phase = self.r[: x.shape[1], None].float() * inv
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("resets", inv_freq="inv_freq", exact=half_width)
class MadeAnewInTrain(nn.Module):
    """``train`` makes the table anew."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def train(self, mode: bool = True) -> MadeAnewInTrain:
        self.register_buffer("inv_freq", _frequencies(self.dim), persistent=False)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("sandwich")
class OnlyCosines(nn.Module):
    """Distances through cosines alone, summed over frequencies, as a bias."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        distance = torch.arange(LONGEST, dtype=torch.float32)
        waves = torch.cos(distance[:, None] / 10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("table", waves.sum(-1) - dim // 2, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


@style("ntk", "unharmed")
class NtkInForward(nn.Module):
    """NTK by hand: a longer sequence makes its own base, the buffer stays."""

    def __init__(self, dim: int = DIM, trained: int = 400, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.trained, self.base = dim, trained, base
        self.register_buffer("inv_freq", self._make(base), persistent=False)

    def _make(self, base: float) -> torch.Tensor:
        return 1.0 / (base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim))

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        alpha = max(1.0, 2 ** math.ceil(math.log2(n / self.trained) + 1) - 1)
        self.inv_freq = self._make(self.base * alpha ** (self.dim / (self.dim - 2)))
        return _turned(self.inv_freq, x)
