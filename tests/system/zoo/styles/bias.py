"""Positions as a bias of scores: ALiBi, relative, log-spaced; and as a decay."""

from __future__ import annotations

import math
from typing import Any

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
