"""Parts that TorchScript compiles."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import turned_in_fp32 as _turned
from styles.owners import Attention, frequencies
from styles.registry import DIM, style

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + swapped * sin

    @torch.jit.script
    def angles(inv_freq: torch.Tensor, length: int) -> torch.Tensor:
        t = torch.arange(length, device=inv_freq.device, dtype=inv_freq.dtype)
        return torch.outer(t, inv_freq)


@style("scripted", "application", shows="output", inv_freq="inv_freq")
class ScriptedApplication(Attention):
    """ESM's: a compiled function takes cos and sin of the dtype of x."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def turn(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        emb = torch.outer(torch.arange(x.shape[2]).float(), self.inv_freq.float()).repeat(1, 2)
        return turned(x, emb.cos().to(x.dtype), emb.sin().to(x.dtype))


@style("scripted", "tables", inv_freq="inv_freq", exact=half_width)
class ScriptedPhases(nn.Module):
    """A compiled function counts in the dtype of the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        phase = angles(self.inv_freq, x.shape[1])
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@torch.jit.script
def scripted_frequencies(dim: int, base: float) -> torch.Tensor:
    return 1.0 / torch.pow(base, torch.arange(0, dim, 2, dtype=torch.float32) / dim)


@style("scripted", inv_freq="inv_freq", exact=half_width)
class FrequenciesByAScript(nn.Module):
    """TorchScript computes the frequencies, which no mode of Python's hears of."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", scripted_frequencies(dim, 10000.0), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)
