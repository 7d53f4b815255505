"""Positions as a bias of scores: ALiBi, relative, log-spaced; and as a decay."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair
from styles.registry import DIM, LONGEST, Arguments, hidden_states, style

HEADS = 8


@style("bias", "alibi", "buffer")
class AlibiBuffer(nn.Module):
    """MPT's."""

    def __init__(self, heads: int = HEADS, length: int = LONGEST) -> None:
        super().__init__()
        m = torch.arange(1, heads + 1, dtype=torch.float32) * (8 / heads)
        slopes = 1.0 / torch.pow(2, m)
        bias = torch.arange(1 - length, 1, dtype=torch.int32).view(1, 1, length) * slopes.view(heads, 1, 1)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias[..., -x.shape[1] :].to(x.dtype)


def power_slopes(heads: int) -> list[float]:
    start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
    return [start * start**i for i in range(heads)]


@style("bias", "alibi", "attribute")
class AlibiSlopes(nn.Module):
    """Slopes of twelve heads from a list, kept as an attribute; the distances are made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.tensor([*power_slopes(8), *power_slopes(16)[0::2][:4]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(x.shape[1]).float() - x.shape[1] + 1
        return (self.slopes.float()[:, None] * distance).to(x.dtype)


@style("bias", "alibi", "buffer")
class AlibiOfTwoHeads(nn.Module):
    """Two slopes and no more, with distances made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 0.7 * torch.tensor(power_slopes(2)).view(-1, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(x.shape[1]).float() - x.shape[1] + 1
        return (self.slopes.float() * distance).to(x.dtype)


@style("bias", "alibi", "parameter", roundings=2)
class AlibiFrozen(nn.Module):
    """Slopes that are a frozen parameter."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        slopes = torch.tensor(power_slopes(heads)).view(-1, 1)
        self.slopes = nn.Parameter(slopes * 0.7, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(x.shape[1]).float() - x.shape[1] + 1
        return (self.slopes.float() * distance).to(x.dtype)


def mask(dtype: torch.dtype, length: int) -> Arguments:
    """An integer attention mask whose first five are padding, and hidden states."""
    attention_mask = torch.ones(2, length, dtype=torch.int64)
    attention_mask[:, :5] = 0
    return attention_mask, *hidden_states(dtype, length)


@style("bias", "unharmed", "alibi", "in forward", inputs=mask)
class AlibiFromAMask(nn.Module):
    """Bloom's: all is made in forward, in FP32."""

    def forward(self, attention_mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        base = torch.tensor(2 ** (-(2 ** -(math.log2(HEADS) - 3))), dtype=torch.float32)
        slopes = torch.pow(base, torch.arange(1, 1 + HEADS, dtype=torch.int32))
        positions = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
        return (slopes[..., None] * positions).to(x.dtype)


@style("bias", "unharmed", "relative", "in forward")
class BucketedBias(nn.Module):
    """T5's: distances in buckets, half of them logarithmic, and a trained bias for each."""

    def __init__(self, buckets: int = 32, max_distance: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.buckets, self.max_distance = buckets, max_distance
        self.relative_attention_bias = nn.Embedding(buckets, heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(x.shape[1])
        max_exact = self.buckets // 2
        large = torch.log(distance.clamp(min=1).float() / max_exact) / math.log(self.max_distance / max_exact)
        large = (max_exact + (large * (self.buckets - max_exact)).to(torch.long)).clamp(max=self.buckets - 1)
        return self.relative_attention_bias(torch.where(distance < max_exact, distance, large))


@style("bias", "relative", "buffer")
class BucketsInABuffer(nn.Module):
    """The same with the buckets, integers, in a buffer."""

    def __init__(self, buckets: int = 32, max_distance: int = 256, length: int = LONGEST) -> None:
        super().__init__()
        distance = torch.arange(length)
        scale = torch.log(distance.clamp(min=1) / 16) / math.log(max_distance / 16) * 16
        large = (16 + scale.to(torch.int64)).clamp(max=buckets - 1)
        self.register_buffer("buckets", torch.where(distance < 16, distance, large), persistent=False)
        self.bias = nn.Embedding(buckets, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias(self.buckets[: x.shape[1]])


@style("bias", "log-spaced", "mlp", shows="output")
class LogSpacedBias(nn.Module):
    """Swin V2's: log-spaced coordinates, explicitly FP32, go through a small network."""

    def __init__(self, window: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 64, bias=True), nn.ReLU(inplace=True), nn.Linear(64, heads, bias=False)
        )
        h = torch.arange(-(window - 1), window, dtype=torch.float32)
        table = torch.stack(torch.meshgrid([h, h], indexing="ij")).permute(1, 2, 0).contiguous().unsqueeze(0)
        table /= window - 1
        table *= 8
        table = torch.sign(table) * torch.log2(torch.abs(table) + 1.0) / math.log2(8)
        self.register_buffer("relative_coords_table", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.cpb_mlp(self.relative_coords_table)
        return 16 * torch.sigmoid(bias).flatten(0, -2)


@style("bias", "log-spaced", "mlp", shows="output")
class LogSpacedBiasCast(LogSpacedBias):
    """The table is cast to the dtype of the weights when it is used, as newer releases do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.cpb_mlp(self.relative_coords_table.to(self.cpb_mlp[0].weight.dtype))
        return 16 * torch.sigmoid(bias).flatten(0, -2)


@style("bias", "log", "buffer", roundings=2, widens=True)
class KernelisedBias(nn.Module):
    """Kerple's: minus the logarithm of the distances, which are counted in floats."""

    def __init__(self, length: int = LONGEST) -> None:
        super().__init__()
        distance = torch.arange(0.0, length)
        self.register_buffer("log_distance", torch.log1p(distance * 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -1.5 * self.log_distance[: x.shape[1]].float()


@style("xpos", "buffer", inv_freq="inv_freq", roundings=3)
class XPos(nn.Module):
    """Cos and sin are scaled by a power of the position."""

    def __init__(self, dim: int = DIM, scale_base: int = 512) -> None:
        super().__init__()
        self.scale_base = scale_base
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))
        scale = (torch.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        n = x.shape[1]
        t = torch.arange(n, device=x.device).type_as(self.inv_freq)
        freqs = torch.outer(t, self.inv_freq)
        power = (t - n // 2) / self.scale_base
        scale = self.scale ** power.unsqueeze(-1)
        return (freqs.cos() * scale).to(x.dtype), (freqs.sin() / scale).to(x.dtype)


@style("decay", "buffer", inv_freq="angle", roundings=3)
class Retention(nn.Module):
    """RetNet's: angles without interleaving, and the logarithm of a decay for each head."""

    def __init__(self, dim: int = DIM, heads: int = 4) -> None:
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, dim // 2))
        decay = torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float)))
        self.register_buffer("angle", angle.unsqueeze(-1).repeat(1, 2).flatten())
        self.register_buffer("decay", decay)

    def forward(self, x: torch.Tensor) -> tuple[Pair, torch.Tensor]:
        index = torch.arange(x.shape[1]).to(self.decay)
        phase = index[:, None] * self.angle[None, :]
        reach = index[:, None] * self.decay[None, :]
        return (phase.sin(), phase.cos()), reach.exp()


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


@style("buffer")
class LogN(nn.Module):
    """Qwen's scale of queries by the logarithm of their position, from a list."""

    def __init__(self, trained: int = 128, longest: int = LONGEST) -> None:
        super().__init__()
        logn = [math.log(i, trained) if i > trained else 1.0 for i in range(1, longest + 1)]
        self.register_buffer("logn_tensor", torch.tensor(logn)[None, :, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logn_tensor[:, : x.shape[1]].to(x.dtype)


@style("formula")
class Retained(nn.Module):
    """RetNet: angles by linspace, a decay for each head, and the mask that forward makes of it."""

    def __init__(self, dim: int = DIM, heads: int = 8) -> None:
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, dim // 2))
        self.register_buffer("angle", angle.unsqueeze(-1).repeat(1, 2).flatten())
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float))))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(x.shape[1]).to(self.decay)
        sin = torch.sin(index[:, None] * self.angle[None, :])
        return sin, torch.exp((index[:32, None] - index[None, :32]).tril() * self.decay[:, None, None])


@style("bias", "slopes", "literal")
class FewSlopesFromAList(nn.Module):
    """The slopes of six heads under a name that says nothing, times the roots of distances."""

    def __init__(self, heads: int = 6) -> None:
        super().__init__()
        self.register_buffer("m", torch.tensor([2.0 ** (-8 * i / heads) for i in range(1, heads + 1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        away = (places[:, None] - places[None]).abs().float().sqrt()
        return (-away * self.m.float()[:, None, None]).to(x.dtype)


@style("bias", "slopes", "literal")
class SlopesOfARank(nn.Module):
    """Four of twelve heads' slopes under a name that says nothing, times logarithms of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.tensor([2.0 ** (-8 * i / 12) for i in range(1, 13)][4:8]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        away = torch.log1p((places[:, None] - places[None]).abs().float())
        return (-away * self.m.float()[:, None, None]).to(x.dtype)
