"""Positions of more than one axis."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair
from styles.formulas import frequencies as _frequencies
from styles.registry import DIM, LONGEST, Arguments, hidden_and_positions, hidden_states, style


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


@style("vision", "complex", roundings=1)
class AxialCis(nn.Module):
    """SAM 2's: complex phases of a grid, made anew where the picture has another size."""

    def __init__(self, dim: int = DIM, side: int = 16) -> None:
        super().__init__()
        self.dim = dim
        self.freqs_cis = self.compute(side, side)

    def compute(self, end_x: int, end_y: int) -> torch.Tensor:
        freqs = 1.0 / (10000.0 ** (torch.arange(0, self.dim, 4)[: self.dim // 4].float() / self.dim))
        t = torch.arange(end_x * end_y, dtype=torch.float32)
        t_x, t_y = (t % end_x).float(), torch.div(t, end_x, rounding_mode="floor").float()
        fx, fy = torch.outer(t_x, freqs), torch.outer(t_y, freqs)
        cis = [torch.polar(torch.ones_like(f), f) for f in (fx, fy)]
        return torch.cat(cis, dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = math.ceil(math.sqrt(x.shape[1]))
        self.freqs_cis = self.freqs_cis.to(x.device)
        if self.freqs_cis.shape[0] != side * side:
            self.freqs_cis = self.compute(side, side).to(x.device)
        return torch.view_as_real(self.freqs_cis).to(x.dtype)


@style("vision", "timm")
class RotaryEmbeddingCat(nn.Module):
    """timm's: bands in a buffer, the embedding made from them in each forward."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        bands = torch.linspace(1.0, 112.0, dim // 4, dtype=torch.float32)
        self.register_buffer("bands", bands * math.pi, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.linspace(-1.0, 1.0, steps=16)
        grid = torch.stack(torch.meshgrid(t, t, indexing="ij"), dim=-1)
        pos = grid.unsqueeze(-1) * self.bands.float()
        return torch.cat([pos.sin().reshape(256, -1), pos.cos().reshape(256, -1)], -1).to(x.dtype)


@style("vision", "buffer", "spiral")
class SpiralGrid(nn.Module):
    """Positions of a spiral around the middle, in a buffer of floats."""

    def __init__(self, side: int = 24, dim: int = DIM) -> None:
        super().__init__()
        y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        middle = (side - 1) / 2
        radius = ((y - middle) ** 2 + (x - middle) ** 2).float().sqrt()
        order = radius.flatten().argsort(stable=True).argsort(stable=True).float()
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = self.order.float()[:, None] * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("vision", "swin")
class RelativeCoordsTable(nn.Module):
    """Swin v2's log-spaced coordinates, and the index that gathers from them."""

    def __init__(self, window: int = 8) -> None:
        super().__init__()
        h = torch.arange(-(window - 1), window, dtype=torch.float32)
        table = torch.stack(torch.meshgrid([h, h], indexing="ij")).permute(1, 2, 0).contiguous()[None]
        table = table / (window - 1) * 8
        table = torch.sign(table) * torch.log2(torch.abs(table) + 1.0) / np.log2(8)
        self.register_buffer("relative_coords_table", table, persistent=False)
        coords = torch.stack(torch.meshgrid([torch.arange(window)] * 2, indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative += window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("relative_position_index", relative.sum(-1), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.relative_coords_table.to(x.dtype), self.relative_position_index


@style("diffusers", "float64", "unharmed")
class GetOneDRotary(nn.Module):
    """Flux's: phases in float64 where the device has that, for three axes."""

    def __init__(self, axes: tuple[int, ...] = (8, 12, 12)) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> Pair:
        pos = torch.arange(x.shape[1]).float()
        cos, sin = [], []
        for dim in self.axes:
            freqs = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=torch.float64)[: dim // 2] / dim))
            phase = torch.outer(pos, freqs)
            cos.append(phase.cos().repeat_interleave(2, dim=1).float())
            sin.append(phase.sin().repeat_interleave(2, dim=1).float())
        return torch.cat(cos, -1).to(x.dtype), torch.cat(sin, -1).to(x.dtype)


@style("diffusers", "buffer")
class WanRotary(nn.Module):
    """Wan's: a cos and a sin buffer made in float64 of three axes, split again in forward."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        h = 2 * (dim // 6)
        cos, sin = [], []
        for part in (dim - 2 * h, h, h):
            freqs = 1.0 / (10000 ** (torch.arange(0, part, 2, dtype=torch.float64) / part))
            phase = torch.outer(torch.arange(LONGEST, dtype=torch.float64), freqs)
            cos.append(phase.cos().repeat_interleave(2, 1).float())
            sin.append(phase.sin().repeat_interleave(2, 1).float())
        self.register_buffer("freqs_cos", torch.cat(cos, dim=1), persistent=False)
        self.register_buffer("freqs_sin", torch.cat(sin, dim=1), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.freqs_cos[: x.shape[1]].to(x.dtype), self.freqs_sin[: x.shape[1]].to(x.dtype)


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


@style("positions", inputs=hidden_and_positions, inv_freq="inv_freq")
class MixedAngles(nn.Module):
    """Mixed RoPE of vision models: each head has its own angles, and positions are two-dimensional."""

    def __init__(self, dim: int = DIM, heads: int = 2) -> None:
        super().__init__()
        mag = 1 / (10.0 ** (torch.arange(0, dim, 4)[: dim // 4].float() / dim))
        angles = torch.arange(heads).float() * (math.pi / heads)
        fx = torch.cat([mag * torch.cos(angles[:, None]), mag * torch.cos(math.pi / 2 + angles[:, None])], -1)
        fy = torch.cat([mag * torch.sin(angles[:, None]), mag * torch.sin(math.pi / 2 + angles[:, None])], -1)
        self.register_buffer("inv_freq", torch.stack([fx, fy]), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        px, py = (position_ids[0] % 25).float(), torch.div(position_ids[0], 25, rounding_mode="floor").float()
        freqs = self.inv_freq.float()
        phase = px[:, None, None] * freqs[0] + py[:, None, None] * freqs[1]
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("random", "not positions")
class RandomGaussian(nn.Module):
    """SAM's PositionEmbeddingRandom, drawn from a generator of its own."""

    def __init__(self, features: int = DIM // 2) -> None:
        super().__init__()
        matrix = torch.randn((2, features), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        self.register_buffer("positional_encoding_gaussian_matrix", matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        coords = torch.linspace(-1, 1, x.shape[1])[:, None].repeat(1, 2)
        phase = 2 * np.pi * (coords @ self.positional_encoding_gaussian_matrix.float())
        return torch.cat([phase.sin(), phase.cos()], dim=-1).to(x.dtype)
