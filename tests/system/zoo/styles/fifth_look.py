"""Styles of a fifth look: biases, pictures, sound, molecules, points; and models that read what they hold."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from styles.formulas import Pair, half_width, neighbours
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def _frequencies(dim: int = DIM, base: float = 10000.0) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


def _turned(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    phase = torch.outer(torch.arange(x.shape[1], device=x.device).float(), inv_freq.float())
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


# ---- biases -----------------------------------------------------------------------------------------


@style("bias", "buffer")
class KerpleLog(nn.Module):
    """KERPLE with its log distances in a buffer."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.register_buffer("rel_dist", torch.arange(LONGEST).float().log1p()[None, None], persistent=False)
        self.p = nn.Parameter(torch.full((heads, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rel_dist[..., : x.shape[1]].to(x.dtype)


@style("bias", "in forward", "unharmed", shows="output", roundings=4, not_on=("meta",))
class FireBias(nn.Module):
    """FIRE: distances through a logarithm, a threshold and an MLP; on meta nothing tells its number."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, heads))
        self.register_buffer("init_L", torch.tensor(64.0))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], dtype=torch.float, device=x.device)[:100]
        distance = (positions[:, None] - positions[None, :]).clamp(min=0)
        threshold = torch.maximum(positions, self.init_L.float())[:, None]
        normalized = torch.log(distance + 1) / (torch.log(threshold + 1) + self.eps)
        return self.mlp(normalized.unsqueeze(-1).to(x.dtype))


@style("bias", "integers")
class T5BucketsInABuffer(nn.Module):
    """Bidirectional buckets of T5, made once and gathered at each call."""

    def __init__(self) -> None:
        super().__init__()
        position = torch.arange(LONGEST)
        n = position[None, :] - position[:, None]
        is_far = n.abs() >= 8
        far = 8 + (torch.log(n.abs().float().clamp(min=1) / 8) / math.log(128 / 8) * 8).long()
        buckets = torch.where(is_far, far.clamp(max=15), n.abs()) + (n > 0).long() * 16
        self.register_buffer("relative_attention_bucket", buckets, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relative_attention_bucket[: x.shape[1], : x.shape[1]]


@style("bias", "alibi")
class SlopesOfNumpy(nn.Module):
    """ALiBi slopes of a list, and a float distance matrix that is a buffer."""

    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        slopes = [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
        self.register_buffer("m", torch.tensor(slopes)[:, None, None], persistent=False)
        position = np.arange(LONGEST)
        distance = torch.from_numpy(position[None, :] - position[:, None]).float()
        self.register_buffer("relative", distance, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = min(x.shape[1], 256)
        return (self.m.float() * self.relative[:n, :n].float()).to(x.dtype)


@style("bias", "decay", roundings=1)
class DecayOfRetNet(nn.Module):
    """log(1 - 2^(-5 - h)) for each head."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        decay = torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float)))
        self.register_buffer("decay", decay)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[1]).to(torch.float)
        return (position[None] * self.decay.float()[:, None]).to(x.dtype)


@style("rwkv")
class DecaySpeedOfRwkv(nn.Module):
    """RWKV's initial decay speeds as a buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        ratio = torch.arange(dim, dtype=torch.float32) / (dim - 1)
        self.register_buffer("decay_speed", -6 + 5 * ratio**0.85, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.exp(self.decay_speed.float())).to(x.dtype)


@style("mamba", shows="output", roundings=4)
class MambaWithRope(nn.Module):
    """A state space's A_log is a parameter; the rotary tables of the same module are buffers."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        a = torch.arange(1, 17, dtype=torch.float32).repeat(dim, 1)
        self.A_log = nn.Parameter(torch.log(a))
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


# ---- pictures ---------------------------------------------------------------------------------------


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


# ---- sound ------------------------------------------------------------------------------------------


@style("audio", "lazy")
class ConformerRelative(nn.Module):
    """ESPnet's relative positions: a table from both sides, extended when it is too short."""

    def __init__(self, dim: int = DIM, longest: int = 400) -> None:
        super().__init__()
        self.dim = dim
        self.pe: torch.Tensor | None = None
        self.extend_pe(torch.tensor(0.0).expand(1, longest))

    def extend_pe(self, x: torch.Tensor) -> None:
        if self.pe is not None and self.pe.size(1) >= x.size(1) * 2 - 1:
            if self.pe.dtype != x.dtype or self.pe.device != x.device:
                self.pe = self.pe.to(dtype=x.dtype, device=x.device)
            return
        positive, negative = torch.zeros(x.size(1), self.dim), torch.zeros(x.size(1), self.dim)
        position = torch.arange(0, x.size(1), dtype=torch.float32).unsqueeze(1)
        div_term = torch.exp(
            torch.arange(0, self.dim, 2, dtype=torch.float32) * -(math.log(10000.0) / self.dim)
        )
        positive[:, 0::2], positive[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        negative[:, 0::2], negative[:, 1::2] = (
            torch.sin(-1 * position * div_term),
            torch.cos(-1 * position * div_term),
        )
        pe = torch.cat([torch.flip(positive, [0]).unsqueeze(0), negative[1:].unsqueeze(0)], dim=1)
        self.pe = pe.to(device=x.device, dtype=x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extend_pe(x)
        assert self.pe is not None
        middle = self.pe.size(1) // 2
        return self.pe[:, middle - x.size(1) + 1 : middle + x.size(1)]


@style("audio", "conv", not_on=("meta",))
class SinesInAConvolution(nn.Module):
    """Fixed sines are the weight of a frozen convolution; on meta nothing tells that weight from another."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        table = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.conv = nn.Conv1d(1, dim, LONGEST, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(torch.cat((table.cos(), table.sin()), 1).t()[:, None])
        self.conv.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv.weight[:, 0, : x.shape[1]].to(x.dtype)


@style("audio", "timescales")
class WhisperSinusoids(nn.Module):
    """OpenAI's ``sinusoids``, a buffer that is read with ``.to(x.dtype)``."""

    def __init__(self, channels: int = DIM) -> None:
        super().__init__()
        increment = np.log(10000) / (channels // 2 - 1)
        inv = torch.exp(-increment * torch.arange(channels // 2))
        scaled = torch.arange(LONGEST)[:, np.newaxis] * inv[np.newaxis, :]
        self.register_buffer("positional_embedding", torch.cat([torch.sin(scaled), torch.cos(scaled)], dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positional_embedding[: x.shape[1]].to(x.dtype)


# ---- molecules and points ---------------------------------------------------------------------------


@style("radial")
class GaussianSmearing(nn.Module):
    """SchNet's centres of distances: counted out by linspace, and fed to a Gaussian."""

    def __init__(self, count: int = 16) -> None:
        super().__init__()
        offset = torch.linspace(0.0, 10.0, count)
        self.coeff = -0.5 / (offset[1] - offset[0]).item() ** 2
        self.register_buffer("offset", offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(x.shape[1]).float()[:, None] / 64
        return torch.exp(self.coeff * (distance - self.offset.float()) ** 2).to(x.dtype)


@style("points", "nerf")
class NerfBands(nn.Module):
    """NeRF's bands: powers of two, whatever they are called."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        bands = 2.0 ** torch.linspace(0.0, count - 1, count) * math.pi
        self.register_buffer("bands", bands, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = (torch.arange(x.shape[1]).float() / 64)[:, None] * self.bands.float()
        return torch.cat((phase.sin(), phase.cos()), -1).to(x.dtype)


@style("protein", "interleaved", exact=neighbours, inv_freq="inv_freq")
class AlphaFoldLike(nn.Module):
    """Relative positions of residues, frequencies interleaved by stack and flatten."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float()[None]
        phase = torch.stack((phase, phase), -1).flatten(-2)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


# ---- plain names beside weights ---------------------------------------------------------------------


@style("weights", "plain name", shows="output", roundings=4)
class PlainNameBesideWeights(nn.Module):
    """Frequencies are called ``w``, and stand beside a projection."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("w", _frequencies(dim), persistent=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.w.float())
        return self.proj(torch.cat((phase.cos(), phase.sin()), -1).to(x.dtype))


@style("weights", "time", shows="output", roundings=4)
class TimeMlpWithEmb(nn.Module):
    """A diffusion model's: ``emb`` is a buffer, positions are timesteps."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("emb", torch.exp(torch.arange(dim // 2) * -(math.log(10000) / (dim // 2 - 1))))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        emb = torch.arange(x.shape[1]).float()[:, None] * self.emb.float()[None, :]
        return self.mlp(torch.cat((emb.sin(), emb.cos()), dim=-1).to(x.dtype))


@style("weights", "helper")
class RotateQueriesAndKeys(nn.Module):
    """lucidrains': the rotary module has ``rotate_queries_or_keys`` and a parameter that may be learnt."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.freqs = nn.Parameter(_frequencies(dim), requires_grad=False)
        self.register_buffer("dummy", torch.tensor(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seq = torch.arange(x.shape[1], device=self.dummy.device, dtype=x.dtype)
        freqs = torch.einsum("..., f -> ... f", seq.type(self.freqs.dtype), self.freqs)
        return freqs.float().repeat_interleave(2, -1).cos().to(x.dtype)


@style("parameters", "dict")
class FrozenParameterDict(nn.Module):
    """Frozen tables in a ParameterDict."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.tables = nn.ParameterDict(
            {
                "cos": nn.Parameter(phase.cos(), requires_grad=False),
                "sin": nn.Parameter(phase.sin(), requires_grad=False),
            }
        )

    def forward(self, x: torch.Tensor) -> Pair:
        return self.tables["cos"][: x.shape[1]].to(x.dtype), self.tables["sin"][: x.shape[1]].to(x.dtype)


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


# ---- models that read what they hold ----------------------------------------------------------------


@style("hooks", inv_freq="rope.inv_freq", exact=half_width)
class TablesByAForwardHook(nn.Module):
    """A forward hook of its child turns phases into cos and sin."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases()
        self.rope.register_forward_hook(lambda module, args, out: (out.cos(), out.sin()))

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.rope(x)
        return cos.to(x.dtype), sin.to(x.dtype)


class Phases(nn.Module):
    """Phases in FP32."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())


@style("swapped", inv_freq="rope.inv_freq", exact=half_width)
class AsksByMethod(nn.Module):
    """The parent asks its child by a method that is not forward, and the child has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = NoForward()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope.tables(x.shape[1], x.dtype)


class NoForward(nn.Module):
    """Answers by a method."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def tables(self, length: int, dtype: torch.dtype) -> Pair:
        phase = torch.arange(length, dtype=torch.float32)[:, None] * self.inv_freq[None].float()
        return phase.cos().to(dtype), phase.sin().to(dtype)


@style("static", "unharmed")
class StaticTables(nn.Module):
    """Tables of a class that is shared by all lengths, filled by a static method at the first call."""

    TABLES: ClassVar[dict[int, Pair]] = {}

    @staticmethod
    def build(length: int, dim: int = DIM) -> Pair:
        if length not in StaticTables.TABLES:
            phase = torch.outer(torch.arange(length, dtype=torch.float32), _frequencies(dim))
            StaticTables.TABLES[length] = phase.cos(), phase.sin()
        return StaticTables.TABLES[length]

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.build(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


@style("offsets", inputs=hidden_and_positions, exact=None)
class GatheredByPositions(nn.Module):
    """``F.embedding`` of positions in a table that is a buffer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.register_buffer("embed_positions", torch.cat((phase.sin(), phase.cos()), 1), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(position_ids, self.embed_positions).to(x.dtype)


@style("clipped")
class RelativeWithClip(nn.Module):
    """Shaw's relative positions as a buffer of clipped floats, scaled to [-1, 1]."""

    def __init__(self, reach: int = 100) -> None:
        super().__init__()
        position = torch.arange(LONGEST)
        clipped = (position[None] - position[:, None]).clamp(-reach, reach).float() / reach
        self.register_buffer("relative", clipped, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = min(x.shape[1], 200)
        return self.relative[:n, :n].to(x.dtype)


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
