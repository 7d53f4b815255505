"""Bases, factors and ratios that are one number of a tensor, and frequencies as a list of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import cos_and_sin as _rotated
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, hidden_and_positions, style


@style("scalar")
class BaseInABuffer(nn.Module):
    """The base is a buffer of no dimension, and 500000 is no BF16 number."""

    def __init__(self, dim: int = DIM, base: float = 500000.0) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("base", torch.tensor(base), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = 1.0 / self.base.float() ** (torch.arange(0, self.dim, 2).float() / self.dim)
        return _rotated(torch.outer(torch.arange(x.shape[1]).float(), inv_freq), x)


@style("scalar")
class ThetaInATensor(nn.Module):
    """The base is a tensor of one element, and no buffer."""

    def __init__(self, dim: int = DIM, theta: float = 1000003.0) -> None:
        super().__init__()
        self.dim = dim
        self.rope_theta = torch.tensor([theta])

    def forward(self, x: torch.Tensor) -> Pair:
        exponent = torch.arange(0, self.dim, 2).float() / self.dim
        inv_freq = torch.exp(-torch.log(self.rope_theta.float()) * exponent)
        return _rotated(torch.outer(torch.arange(x.shape[1]).float(), inv_freq), x)


@style("scalar", inv_freq="inv_freq")
class ScaledByABuffer(nn.Module):
    """Position interpolation by a factor in a buffer of one element."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("position_scale", torch.tensor([1 / 3]))

    def forward(self, x: torch.Tensor) -> Pair:
        positions = torch.arange(x.shape[1]).float() * self.position_scale.float()
        return _rotated(torch.outer(positions, self.inv_freq.float()), x)


@style("scalar", inv_freq="inv_freq")
class ScaledByARow(nn.Module):
    """Interpolation and an attention factor for each channel, all the same, under names that say nothing."""

    def __init__(self, dim: int = DIM, factor: float = 3.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("interpolation", torch.full((dim // 2,), 1 / factor), persistent=False)
        self.register_buffer("gain", torch.ones(dim // 2) * 1.1386, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = self.inv_freq.float() * self.interpolation.float()
        phase, gain = torch.arange(x.shape[1])[:, None] * inv_freq, self.gain.float()
        return (phase.cos() * gain).to(x.dtype), (phase.sin() * gain).to(x.dtype)


@style("scalar", "positions", inputs=hidden_and_positions, inv_freq="inv_freq")
class ScaledByARowAt(nn.Module):
    """The same at positions that it is given."""

    def __init__(self, dim: int = DIM, factor: float = 3.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("interpolation", torch.full((dim // 2,), 1 / factor), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        phase = position_ids[..., None] * (self.inv_freq.float() * self.interpolation.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("scalar", inv_freq="inv_freq")
class ScaleSetByAMethod(nn.Module):
    """DroPE: a number that a trainer moves scales the rotation; the constructor has set it, too."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("strength", torch.ones(()))
        self.anneal(3, 7)

    def anneal(self, step: int, steps: int) -> None:
        self.strength.fill_(1 - step / steps)

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = self.inv_freq.float() * self.strength.float()
        return _rotated(torch.outer(torch.arange(x.shape[1]).float(), inv_freq), x)


@style("scalar", inv_freq="inv_freq")
class RowSetByAMethod(nn.Module):
    """One number for each channel, all the same, that a method puts anew."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("strength", torch.ones(dim // 2), persistent=False)
        self.rescale(1 / 3)

    def rescale(self, factor: float) -> None:
        self.strength = torch.full_like(self.strength, factor)

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = self.inv_freq.float() * self.strength.float()
        return _rotated(torch.outer(torch.arange(x.shape[1]).float(), inv_freq), x)


class Phases(nn.Module):
    """Positions times frequencies, of which others take sines."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return torch.arange(length)[:, None] * self.inv_freq


@style("scalar", inv_freq="rope.inv_freq")
class ChildScaledByRows(nn.Module):
    """What a child returns is scaled by rows in no order, and by one number throughout."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rope = Phases(dim)
        self.register_buffer("stretch", torch.tensor([1 / 3, 0.7, 1.1, 0.9] * (dim // 8)), persistent=False)
        self.register_buffer("gain", torch.full((dim // 2,), 1.1386), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.rope(x.shape[1]) * self.stretch
        return (phase.cos() * self.gain).to(x.dtype), (phase.sin() * self.gain).to(x.dtype)


@style("ema", inv_freq="inv_freq", exact=half_width)
class ScaledByItsOwnBuffer(nn.Module):
    """A second buffer scales the frequencies in place once, at the end of the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)
        self.register_buffer("rope_scale", torch.linspace(1.0, 2.0, DIM // 2), persistent=False)
        self.inv_freq.div_(self.rope_scale)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("lists", "unharmed", inv_freq="inv_freq")
class PythonListOfNumbers(nn.Module):
    """Frequencies are a Python list, from which forward makes a tensor."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.freqs = [10000.0 ** (-i / dim) for i in range(0, dim, 2)]

    @property
    def inv_freq(self) -> Any:
        return torch.tensor(self.freqs)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(torch.tensor(self.freqs, dtype=torch.float32), x)


@style("lists", "from a tensor")
class ListFromATensor(nn.Module):
    """A tensor's numbers as a Python list: what was rounded stays rounded."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.freqs = _frequencies(dim).tolist()

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(torch.tensor(self.freqs, dtype=torch.float32), x)


@style("lists", "numbers of a tensor")
class NumberFromATensor(nn.Module):
    """A ratio is taken out of a tensor by ``item``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.ratio = float(_frequencies(dim)[1])
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Pair:
        inv_freq = self.ratio ** torch.arange(self.dim // 2, dtype=torch.float32)
        return _turned(inv_freq, x)


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
