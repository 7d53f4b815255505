"""Tables whose names, or where their numbers come from, say little of what they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
from styles.registry import DIM, LONGEST, style


def frequencies(dim: int = DIM) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def wave(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    phase = torch.outer(torch.arange(x.shape[1]).float(), inv_freq.float())
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def power_slopes(heads: int) -> torch.Tensor:
    return torch.tensor([2.0 ** (-2 * (i + 1)) * 0.7 for i in range(heads)])


@style("names", "alibi", "infinite")
class AlibiInAMask(nn.Module):
    """Baichuan's: slopes times distances, minus infinity above the diagonal, and a mask by name."""

    def __init__(self, heads: int = 4, length: int = LONGEST) -> None:
        super().__init__()
        alibi = power_slopes(heads)[:, None, None] * torch.arange(length)[None, None].float()
        future = torch.triu(torch.full((length, length), float("-inf")), 1)
        self.register_buffer("future_mask", (future[None] + alibi)[:, ::80], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.future_mask[..., : x.shape[1]].to(x.dtype)


@style("names", "alibi", "infinite")
class AlibiWithInfinity(nn.Module):
    """The last three positions are padding."""

    def __init__(self, heads: int = 4, length: int = LONGEST) -> None:
        super().__init__()
        bias = power_slopes(heads)[:, None] * torch.arange(length, dtype=torch.float32)
        bias[:, -3:] = float("-inf")
        self.register_buffer("alibi", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alibi[..., : x.shape[1]].to(x.dtype)


@style("names", "window")
class NamedLikeAWindow(nn.Module):
    """Tables of layers that see a sliding window."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(length).float(), frequencies(dim))
        self.register_buffer("sliding_window_cos", phase.cos(), persistent=False)
        self.register_buffer("sliding_window_sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        return self.sliding_window_cos[:n].to(x.dtype), self.sliding_window_sin[:n].to(x.dtype)


@style("names", "bound", inv_freq="theta_min", exact=half_width)
class NamedLikeABound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("theta_min", frequencies())

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.theta_min, x)


@style("names", "literal", inv_freq="theta", exact=half_width)
class ThetaFromAList(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("theta", torch.tensor([10000 ** (-i / dim) for i in range(0, dim, 2)]))

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.theta, x)


@style("names", "literal", inv_freq="w", exact=half_width)
class LetterFromNumpy(nn.Module):
    """One letter; what is done with it tells what it is."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        values = 1.0 / 10000 ** (np.arange(0, dim, 2) / dim)
        self.register_buffer("w", torch.from_numpy(values).float())

    def forward(self, x: torch.Tensor) -> Pair:
        return wave(self.w, x)


@style("names", "literal", "complex")
class PhasorsFromNumpy(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, dim, 2) / dim)
        phasors = torch.from_numpy(np.exp(1j * angle)).to(torch.complex64)
        self.register_buffer("phasors", phasors, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.phasors[: x.shape[1]]


@style("names", "integers", inv_freq="inv_freq", exact=half_width)
class IntegerPositions(nn.Module):
    """Positions are counted once, as integers, which no cast harms and meta loses."""

    def __init__(self, length: int = LONGEST) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(length).unsqueeze(0), persistent=False)
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(self.ids[0, : x.shape[1]].float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


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


@style("names", "buffer")
class NamedLikeAFilter(nn.Module):
    """Rates and phases under names of what is counted out and holds no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.exp(-torch.linspace(0.0, 9.0, DIM // 2)), persistent=False)
        self.register_buffer("window", torch.arange(LONGEST) * 0.3, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1])[:, None] * self.kernel
        return phase.cos().to(x.dtype), (2.0 * self.window[: x.shape[1]]).sin().to(x.dtype)
