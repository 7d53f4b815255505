"""Positions of more than one axis."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair
from styles.registry import DIM, Arguments, hidden_states, style


def frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def three_axes(dtype: torch.dtype, length: int) -> Arguments:
    """Hidden states, and positions [3, 1, length] that differ by axis."""
    ids = torch.arange(length)
    return (*hidden_states(dtype, length), torch.stack((ids, ids // 2, length - ids))[:, None])


@style("axes", "mrope", inputs=three_axes, inv_freq="inv_freq")
class Mrope(nn.Module):
    """Qwen2-VL: all axes times all frequencies; sections of channels are taken from each axis."""

    def __init__(self, dim: int = DIM, sections: tuple[int, ...] = (4, 6, 6)) -> None:
        super().__init__()
        self.sections = sections
        self.register_buffer("inv_freq", frequencies(dim, 1e6), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        inv = self.inv_freq[None, None, :, None].float().expand(3, position_ids.shape[1], -1, 1)
        freqs = (inv @ position_ids[:, :, None, :].float()).transpose(2, 3)
        parts = freqs.split(self.sections, dim=-1)
        phase = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        emb = torch.cat((phase, phase), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


@style("axes", "mrope", inputs=three_axes, inv_freq="inv_freq")
class InterleavedMrope(nn.Module):
    """Qwen3-VL: every third channel belongs to an axis."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.inv_freq = frequencies(dim, 5e6)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        freqs = position_ids[..., None].to(self.inv_freq.dtype) * self.inv_freq
        phase = freqs[0].clone()
        for axis, offset in enumerate((1, 2), start=1):
            phase[..., offset::3] = freqs[axis, ..., offset::3]
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("axes", "2D", inv_freq="inv_freq")
class TwoDimensional(nn.Module):
    """A grid of 20 columns: rows turn the first half of the channels, columns the second."""

    def __init__(self, dim: int = DIM, columns: int = 20) -> None:
        super().__init__()
        self.columns = columns
        self.register_buffer("inv_freq", frequencies(dim // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        rows = torch.arange(n, device=x.device) * 7
        freqs = torch.outer(rows.to(self.inv_freq.dtype), self.inv_freq)
        columns = torch.outer((rows % self.columns).to(self.inv_freq.dtype), self.inv_freq)
        emb = torch.cat((freqs, columns), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


@style("axes", "3D", inv_freq="t_freqs")
class ThreeDimensional(nn.Module):
    """A video: time has fewer channels than height and width, and each a buffer of its own."""

    def __init__(self, dims: tuple[int, int, int] = (8, 12, 12)) -> None:
        super().__init__()
        for name, dim in zip("thw", dims, strict=True):
            self.register_buffer(f"{name}_freqs", frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        t, h, w = torch.arange(n), torch.arange(n) // 5, torch.arange(n) % 50
        parts = [
            torch.outer(axis.float(), getattr(self, f"{name}_freqs").float())
            for name, axis in (("t", t), ("h", h), ("w", w))
        ]
        phase = torch.cat(parts, dim=-1)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("axes", "3D", "list", "complex")
class ListOfComplexAxes(nn.Module):
    """As Wan's transformer: phases for each axis, of 1,024 positions in float64, joined on use."""

    def __init__(self, dims: tuple[int, int, int] = (8, 12, 12), length: int = 1024) -> None:
        super().__init__()
        self.freqs = [self.axis(dim, length) for dim in dims]

    @staticmethod
    def axis(dim: int, length: int) -> torch.Tensor:
        freqs = 1.0 / torch.pow(10000, torch.arange(0, dim, 2).to(torch.float64).div(dim))
        angles = torch.outer(torch.arange(length), freqs)
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        ids = (torch.arange(n), torch.arange(n) // 3, torch.arange(n) % 40)
        cis = torch.cat([freqs[index] for freqs, index in zip(self.freqs, ids, strict=True)], dim=-1)
        return torch.view_as_real(cis).to(x.dtype)


def grid_sinusoids(dim: int, size: int) -> np.ndarray:
    """As the masked autoencoder has it, in NumPy."""
    grid = np.stack(np.meshgrid(np.arange(size, dtype=np.float32), np.arange(size, dtype=np.float32)))
    omega = 1.0 / 10000 ** (np.arange(dim // 4, dtype=np.float64) / (dim / 4.0))
    parts = []
    for axis in grid.reshape(2, -1):
        out = np.einsum("m,d->md", axis, omega)
        parts += [np.sin(out), np.cos(out)]
    return np.concatenate(parts, axis=1)


@style("axes", "2D", "numpy", "parameter")
class GridOfSinusoids(nn.Module):
    def __init__(self, dim: int = DIM, size: int = 25) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, size * size, dim), requires_grad=False)
        self.pos_embed.data.copy_(torch.from_numpy(grid_sinusoids(dim, size)).float().unsqueeze(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pos_embed[:, : x.shape[1]].to(x.dtype)


@style("axes", "2D", "continuous", inv_freq="periods")
class ContinuousCoordinates(nn.Module):
    """DINOv3: coordinates between -1 and 1 in the dtype of the periods, divided by periods."""

    def __init__(self, dim: int = DIM, base: float = 100.0) -> None:
        super().__init__()
        self.base, self.dim = base, dim
        self.register_buffer("periods", torch.empty(dim // 4), persistent=True)
        self._init_weights()

    def _init_weights(self) -> None:
        steps = 2 * torch.arange(self.dim // 4, device=self.periods.device) / (self.dim // 2)
        self.periods.data = self.base**steps

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        dd = {"device": self.periods.device, "dtype": self.periods.dtype}
        h = torch.arange(0.5, n, **dd) / n
        w = (torch.arange(0.5, n, **dd) % 25) / 25
        coords = 2.0 * torch.stack((h, w), dim=-1) - 1.0
        angles = 2 * torch.pi * 40 * coords[:, :, None] / self.periods[None, None, :]
        angles = angles.flatten(1, 2).tile(2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
