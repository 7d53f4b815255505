"""Positions that are counted in forward."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from styles.formulas import Pair, half_width, phases, twice, twice_in_batch
from styles.formulas import cos_and_sin as _rotated
from styles.formulas import frequencies as _frequencies
from styles.registry import DIM, LONGEST, Arguments, hidden_and_positions, hidden_states, style


@style("in forward", inv_freq="inv_freq", exact=twice)
class CountedInTheDtypeOfX(nn.Module):
    def __init__(self, dim: int = DIM, base: int = 10000) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        freqs = torch.outer(t, self.inv_freq.to(x.dtype))
        emb = torch.cat([freqs, freqs], dim=-1)
        return emb.cos(), emb.sin()


@style("in forward", inv_freq="inv_freq", exact=half_width)
class CountedInTheDtypeOfInvFreq(nn.Module):
    """Cos and sin go out in the dtype that inv_freq has by now."""

    def __init__(self, dim: int = DIM, base: int = 10000) -> None:
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[1], device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        return freqs.cos(), freqs.sin()


@style("in forward", "unharmed", "nothing kept")
class NothingKept(nn.Module):
    """Right on every path: all is computed in FP32 when it is needed."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Pair:
        freqs = torch.exp(-math.log(10000) * torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        args = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * freqs[None]
        return torch.cos(args).to(x.dtype), torch.sin(args).to(x.dtype)


@style("in forward", "nothing kept")
class NothingKeptAndAllLow(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Pair:
        freqs = 10000 ** (-torch.arange(0, self.dim, 2, dtype=x.dtype, device=x.device) / self.dim)
        args = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * freqs
        return args.cos(), args.sin()


class OnlyOne:
    """Refuses to be copied, as a handle of something outside of the process does."""

    def __deepcopy__(self, memo: dict[int, object]) -> OnlyOne:
        raise TypeError("there is one of these")


@style("in forward", "copy")
class NothingKeptAndNotCopied(NothingKeptAndAllLow):
    """Cannot be run aside to see what it returns."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.handle = OnlyOne()


def hidden_and_mask(dtype: torch.dtype, length: int) -> Arguments:
    """Hidden states and an attention mask of their dtype."""
    return (*hidden_states(dtype, length), torch.ones(1, length, dtype=dtype))


@style("in forward", "cumsum", inputs=hidden_and_mask, inv_freq="inv_freq")
class SummedFromAMask(nn.Module):
    """Positions are a running sum in the dtype of the mask."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.float32)
        self.register_buffer("inv_freq", 10000 ** (-steps / dim), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Pair:
        position = (mask.cumsum(dim=1) - 1) * mask
        phase = position[..., None].float() * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("in forward", "linspace", inv_freq="inv_freq")
class SpacedInTheDtypeOfX(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.inv_freq = 1.0 / 10000 ** torch.linspace(0, 1, dim // 2)

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        t = torch.linspace(0, n - 1, n, dtype=x.dtype, device=x.device)
        phase = t[:, None] * self.inv_freq.to(x.device)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("in forward", "positions", inputs=hidden_and_positions, inv_freq="inv_freq", exact=twice_in_batch)
class PositionsGiven(nn.Module):
    """Llama's way since 4.38, autocast off."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.int64).float()
        self.register_buffer("inv_freq", 1.0 / (base ** (steps / dim)), persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        with torch.autocast(device_type="cpu", enabled=False):
            freqs = (expanded.float() @ position_ids[:, None, :].float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


def hidden_and_padded(dtype: torch.dtype, length: int) -> Arguments:
    """Hidden states and positions, the first of them padding."""
    return (*hidden_states(dtype, length), torch.arange(length)[None] - 3)


def padded(inv_freq: torch.Tensor, length: int) -> Pair:
    phase = phases(inv_freq, length) - 3 * inv_freq.detach().double()
    return phase.cos()[None].repeat(1, 1, 2), phase.sin()[None].repeat(1, 1, 2)


@style("in forward", "positions", "negative", inputs=hidden_and_padded, inv_freq="inv_freq", exact=padded)
class NegativePositions(PositionsGiven):
    """Padding has positions below zero."""


@style("in forward", "positions", inputs=hidden_and_positions, inv_freq="inv_freq", exact=twice_in_batch)
class PositionsCast(nn.Module):
    """Integer positions become the dtype of x before they are multiplied."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        freqs = position_ids.to(x.dtype)[..., None] * self.inv_freq.to(x)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def timesteps(dtype: torch.dtype, length: int) -> Arguments:
    """Diffusion times from 0 to 1000, as integers, and hidden states."""
    return (torch.linspace(0, 999, length).long(), *hidden_states(dtype, length))


@style("in forward", "unharmed", "time", inputs=timesteps)
class TimestepSinusoids(nn.Module):
    """As diffusers writes it: FP32 all along, and a cast at the end."""

    def __init__(self, num_channels: int = DIM, max_period: int = 10000) -> None:
        super().__init__()
        self.num_channels, self.max_period = num_channels, max_period

    def forward(self, timesteps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        half = self.num_channels // 2
        exponent = -math.log(self.max_period) * torch.arange(0, half, dtype=torch.float32) / half
        emb = timesteps[:, None].float() * torch.exp(exponent)[None, :]
        return torch.cat([emb.cos(), emb.sin()], dim=-1).to(x.dtype)


@style("in forward", "parent", shows="output", inv_freq="rope.inv_freq", not_on=("vmap",))
class CountedByTheParent(nn.Module):
    """Transformer-XL: the parent counts backwards in the dtype of x, and its child turns that into sines."""

    class Rope(nn.Module):
        """Sinusoids of the positions that it is given."""

        def __init__(self, dim: int = DIM) -> None:
            super().__init__()
            self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, dim, 2.0) / dim)))

        def forward(self, positions: torch.Tensor) -> torch.Tensor:
            phase = torch.outer(positions, self.inv_freq)
            return torch.cat((phase.sin(), phase.cos()), dim=-1)

    def __init__(self) -> None:
        super().__init__()
        self.rope = self.Rope()
        self.r_net = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1] - 1, -1, -1.0, dtype=x.dtype)
        return self.r_net(self.rope(positions))


@style("formula", inv_freq="inv_freq")
class CountedByOnes(nn.Module):
    """Positions as the running sum of a mask of ones in the dtype of x."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        mask = torch.ones(x.shape[1], dtype=torch.int64)
        return _rotated((mask.cumsum(0) - 1)[:, None].float() * self.inv_freq.float(), x)


@style("slots of a step", inputs=hidden_and_positions, inv_freq="inv_freq")
class PositionsTimesScale(nn.Module):
    """Positions are divided by a number and shifted, as of a resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)
        self.stride, self.offset = 4, 0.5

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        positions = (position_ids[0].to(torch.float32) + self.offset) / self.stride
        phase = positions.unsqueeze(-1) * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("padding", inv_freq="inv_freq")
class PaddedToABlock(nn.Module):
    """The length is rounded up to a multiple of 128; what is over is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        length = (x.shape[1] + 127) // 128 * 128
        phase = torch.arange(length).float()[:, None] * self.inv_freq.float()
        cos, sin = F.pad(phase, (0, 2)).cos(), F.pad(phase, (0, 2)).sin()
        return cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype)


@style("mask", "counts")
class CountsByAMask(nn.Module):
    """Fairseq's: positions from a cumulative sum of a mask, looked up in sinusoids."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        half = dim // 2
        emb = math.log(10000) / (half - 1)
        emb = torch.exp(torch.arange(half, dtype=torch.float) * -emb)
        emb = torch.arange(LONGEST + 2, dtype=torch.float).unsqueeze(1) * emb.unsqueeze(0)
        emb = torch.cat([torch.sin(emb), torch.cos(emb)], dim=1)
        emb[1, :] = 0
        self.weights = emb
        self.register_buffer("_float_tensor", torch.FloatTensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.long)
        positions = mask.cumsum(1) + 1
        self.weights = self.weights.to(self._float_tensor)
        return self.weights.index_select(0, positions.view(-1)).detach().to(x.dtype)
