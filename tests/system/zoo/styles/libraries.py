"""Position modules as libraries for speech, vision, video and training at scale write them."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import nn

from styles.formulas import Pair
from styles.registry import DIM, LONGEST, Arguments, hidden_states, style

HEAD_DIM = DIM // 2


def _frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


def _pair(phase: torch.Tensor) -> Pair:
    return phase.cos(), phase.sin()


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def _turned(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = q.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Projected(nn.Module):
    """Queries of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return _heads(self.q(x))


# ---- language models -------------------------------------------------------------------------------------


@style("library", "alibi")
class BiasRememberedByLength(nn.Module):
    """x-transformers': forward registers a bias, and hands out the corner of it that a call needs."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        slopes = torch.tensor([0.7 ** (i + 1) for i in range(heads)])
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.bias is None or self.bias.shape[-1] < length:
            distances = torch.arange(length)[None, None, :] - torch.arange(length)[None, :, None]
            self.register_buffer("bias", -distances.abs() * self.slopes, persistent=False)
        bias: torch.Tensor = self.bias
        return bias[..., -4:, -length:]


@style("library", "xpos", inv_freq="inv_freq", shows="output")
class ScaledAroundTheMiddle(Projected):
    """x-transformers': phases and a power of the position, which goes to keys inverted."""

    def __init__(self, dim: int = HEAD_DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim))
        self.register_buffer("scale", (torch.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim))

    def forward(self, x: torch.Tensor) -> Pair:
        t = torch.arange(x.shape[1])
        cos, sin = _pair(torch.einsum("i,j->ij", t.float(), self.inv_freq.float()))
        scale = self.scale.float() ** ((t - len(t) // 2) / 512)[:, None]
        q = self.queries(x)
        return (
            _turned(q, (cos * scale).to(q.dtype), (sin * scale).to(q.dtype)),
            _turned(q, (cos / scale).to(q.dtype), (sin / scale).to(q.dtype)),
        )


@style("library", "sinusoids", roundings=2, inv_freq="inv_freq")
class SinusoidsTimesATrainedScale(nn.Module):
    """x-transformers': one trained number beside frequencies."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1) * dim**-0.5)
        half = dim // 2
        self.register_buffer("inv_freq", 10000 ** -(torch.arange(half).float() / half), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.einsum("i,j->ij", torch.arange(x.shape[1], device=x.device), self.inv_freq)
        return torch.cat((phase.sin(), phase.cos()), dim=-1) * self.scale


@style("library", "scaling", shows="output")
class FrequenciesScaledOneByOne(Projected):
    """torchtune's Llama 3: a loop over numbers; methods that the constructor calls register the buffers."""

    def __init__(self, dim: int = HEAD_DIM, max_seq_len: int = LONGEST) -> None:
        super().__init__()
        self.dim, self.max_seq_len = dim, max_seq_len
        self.rope_init()

    def rope_init(self) -> None:
        theta = [f / 8 if 2 * math.pi / f > 128 else f for f in _frequencies(self.dim)]
        self.register_buffer("theta", torch.tensor(theta), persistent=False)
        t = torch.arange(self.max_seq_len, dtype=self.theta.dtype)
        phase = torch.einsum("i,j->ij", t, self.theta).float()
        self.register_buffer("cache", torch.stack(_pair(phase), dim=-1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.queries(x)
        return _turned(q.float(), *self.cache[: x.shape[1]].float().unbind(-1)).to(q.dtype)


@style("library", "property", shows="output")
class LengthSetLater(Projected):
    """litgpt's: two bases side by side in one table, made anew when the model's length is set."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_length = LONGEST // 2
        self.max_seq_length = LONGEST

    @property
    def max_seq_length(self) -> int:
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._max_seq_length = value
        phases = [torch.outer(torch.arange(value).float(), _frequencies(HEAD_DIM, b)) for b in (1e4, 1e6)]
        cos, sin = _pair(torch.stack(phases, dim=-1))
        if not hasattr(self, "cos"):
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        else:
            self.cos, self.sin = cos, sin

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        q = self.queries(x)
        return [_turned(q, cos[..., i], sin[..., i]).to(x.dtype) for i in range(2)]


class RememberedPhases(nn.Module):
    """Its forward remembers phases for each length."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    @functools.lru_cache(maxsize=32)  # noqa: B019
    def forward(self, length: int) -> torch.Tensor:
        t = torch.arange(length, dtype=self.inv_freq.dtype)
        t *= 1 / 2
        return torch.outer(t, self.inv_freq)[:, None, None, :]


@style("library", "lru_cache", shows="output", inv_freq="rotary_pos_emb.inv_freq")
class Megatron(nn.Module):
    """Sequence first; a part of the channels; sines are taken, and rounded, where they are applied."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, DIM, bias=False)
        self.rotary_pos_emb = RememberedPhases(HEAD_DIM // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.qkv(x).transpose(0, 1).unflatten(-1, (2, -1))
        phase = self.rotary_pos_emb(x.shape[1])
        turned = _turned(q[..., : HEAD_DIM // 2], phase.cos().to(q.dtype), phase.sin().to(q.dtype))
        return torch.cat((turned, q[..., HEAD_DIM // 2 :]), dim=-1)


class LayerOfAKind(Projected):
    """Has frequencies or none."""

    def __init__(self, use_rope: bool, dim: int = HEAD_DIM) -> None:
        super().__init__()
        self.use_rope, self.dim = use_rope, dim
        self.register_buffer("inv_freq", _frequencies(dim) if use_rope else None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.queries(x)
        if not self.use_rope:
            return q
        cos, sin = _pair(torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float())
        return _turned(q, cos.to(q.dtype), sin.to(q.dtype))


@style("library", "nope", shows="output", inv_freq="layers.0.inv_freq")
class NoRopeInEverySecondLayer(nn.Module):
    """SmolLM3's plan with the frequencies in the layers: a buffer that stays None stands beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LayerOfAKind(use_rope=i % 2 == 0) for i in range(2)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


@style("library", "scaling")
class LongAndShort(nn.Module):
    """vLLM's: two tables with factors for each channel, joined; the length of a call says which rows."""

    def __init__(self, dim: int = DIM, original: int = 512) -> None:
        super().__init__()
        self.dim, self.original = dim, original
        tables = [self.cache(original, 0.02), self.cache(4 * original, 0.5)]
        self.register_buffer("long_short_cos_sin_cache", torch.cat(tables), persistent=False)

    def cache(self, length: int, step: float) -> torch.Tensor:
        factors = torch.tensor([1 + step * i for i in range(self.dim // 2)], dtype=torch.float32)
        phase = torch.einsum("i,j->ij", torch.arange(length).float(), _frequencies(self.dim) / factors)
        return torch.cat(_pair(phase), dim=-1) * math.sqrt(1 + math.log(4) / math.log(self.original))

    def forward(self, x: torch.Tensor) -> Pair:
        length = x.shape[1]
        rows = torch.arange(length) + (self.original if length > self.original else 0)
        cos, sin = self.long_short_cos_sin_cache.index_select(0, rows).to(x.dtype).chunk(2, dim=-1)
        return cos, sin


@style("library", "chunks", inv_freq="inv_freq")
class DualChunks(nn.Module):
    """Positions modulo a chunk, within it, to the next and beyond, eight buffers with names made up."""

    def __init__(self, dim: int = DIM, chunk: int = 64) -> None:
        super().__init__()
        self.dim, self.chunk = dim, chunk
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        inside = torch.arange(LONGEST).float() % (chunk - 16)
        for name, t in (("q", inside), ("qc", (inside + chunk - 16).clamp(max=chunk))):
            cos, sin = _pair(torch.outer(t, self.inv_freq))
            self.register_buffer(f"{name}_cos_cached", cos, persistent=False)
            self.register_buffer(f"{name}_sin_cached", sin, persistent=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        names = [f"{name}_{wave}_cached" for name in ("q", "qc") for wave in ("cos", "sin")]
        return [getattr(self, name)[: x.shape[1]].to(x.dtype) for name in names]


@style("library", "bias", shows="output")
class SandwichBias(Projected):
    """A sum of cosines of distances over wave lengths, which an attribute holds; no sine is taken."""

    def __init__(self, heads: int = 2, dim: int = DIM) -> None:
        super().__init__()
        self.inv = 10000 ** (2 * torch.arange(1, dim // 2 + 1) / dim)
        self.register_buffer("ratios", torch.arange(1, heads + 1) * 8 / heads, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        distances = torch.arange(length)[:4, None] - torch.arange(length)[None]
        waves = torch.cos(distances[..., None] / self.inv).sum(-1)
        bias = self.ratios[:, None, None] * (waves - len(self.inv)) / DIM
        return (self.queries(x)[0, :, :4, :1] + bias).to(x.dtype)


class DecayMask(nn.Module):
    """RetNet's: angles, and a mask of decays that is normalised row by row."""

    def __init__(self, dim: int = HEAD_DIM, heads: int = 4) -> None:
        super().__init__()
        angle = 1.0 / (10000 ** torch.linspace(0, 1, dim // 2))
        self.register_buffer("angle", angle.unsqueeze(-1).repeat(1, 2).flatten())
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=torch.float))))

    def forward(self, length: int) -> tuple[torch.Tensor, ...]:
        index = torch.arange(length).to(self.decay)
        distance = index[-4:, None] - index[None, :]
        mask = torch.exp(distance.masked_fill(distance < 0, torch.inf) * self.decay[:, None, None])
        mask = torch.nan_to_num(mask)
        phase = index[:, None] * self.angle
        return phase.sin(), phase.cos(), mask / mask.sum(dim=-1, keepdim=True).sqrt()


@style("library", "decay", roundings=12)
class RetentionWithItsMask(nn.Module):
    """The model asks for as many rows as it has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = DecayMask()

    def forward(self, x: torch.Tensor) -> Any:
        return self.pos(x.shape[1])


# ---- speech ----------------------------------------------------------------------------------------------


def _sinusoids(length: int, dim: int) -> torch.Tensor:
    half = dim // 2
    inv_freq = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    phase = torch.arange(length, dtype=torch.float).unsqueeze(1) * inv_freq.unsqueeze(0)
    return torch.cat([torch.sin(phase), torch.cos(phase)], dim=1).view(length, -1)


@style("library", "witness", "unharmed", not_on=("meta",))
class WitnessOfItsDtype(nn.Module):
    """fairseq's: the table is an attribute, and goes where a number that nobody has ever filled has gone."""

    def __init__(self, dim: int = DIM, init_size: int = 64) -> None:
        super().__init__()
        self.dim, self.init_size = dim, init_size
        self.weights = _sinusoids(init_size, dim)
        self.register_buffer("_float_tensor", torch.FloatTensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > self.weights.size(0):
            self.weights = _sinusoids(length, self.dim)
        self.weights = self.weights.to(self._float_tensor)
        return self.weights.index_select(0, torch.arange(length)).view(1, length, -1).detach()


@style("library", "conformer", "unharmed")
class ExtendedByItsForward(nn.Module):
    """espnet's: forwards and backwards from the middle, longer and in another dtype when a call asks."""

    def __init__(self, d_model: int = DIM, max_len: int = 64) -> None:
        super().__init__()
        self.d_model, self.max_len = d_model, max_len
        self.pe: torch.Tensor | None = None
        self.extend_pe(torch.tensor(0.0).expand(1, max_len))

    def extend_pe(self, x: torch.Tensor) -> None:
        length = x.size(1)
        if self.pe is not None and self.pe.size(1) >= 2 * length - 1:
            self.pe = self.pe.to(dtype=x.dtype, device=x.device)
            return
        position = torch.arange(length - 1, -length, -1, dtype=torch.float32).unsqueeze(1)
        steps = torch.arange(0, self.d_model, 2, dtype=torch.float32)
        phase = position * torch.exp(steps * -(math.log(10000.0) / self.d_model))
        pe = torch.zeros(2 * length - 1, self.d_model)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(phase), torch.cos(phase)
        self.pe = pe[None].to(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extend_pe(x)
        assert self.pe is not None
        middle = self.pe.size(1) // 2
        return self.pe[:, middle - x.size(1) + 1 : middle + x.size(1)]


# ---- vision and video ------------------------------------------------------------------------------------


@style("library", "2D", shows="output")
class BandsOfPixels(Projected):
    """timm's: bands for coordinates between -1 and 1, and a grid that is as large as the image."""

    def __init__(self, dim: int = HEAD_DIM, max_res: int = 224) -> None:
        super().__init__()
        self.dim, self.max_res = dim, max_res
        bands = torch.linspace(1.0, max_res / 2, dim // 4, dtype=torch.float32) * torch.pi
        self.register_buffer("bands", bands, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[1] // 20, 20)
        t = [torch.linspace(-1.0, 1.0, steps=s, dtype=torch.float32) for s in shape]
        grid = torch.stack(torch.meshgrid(t, indexing="ij"), dim=-1).unsqueeze(-1)
        cos, sin = _pair((grid * self.bands).flatten(0, 1).flatten(1))
        return _turned(self.queries(x), cos.to(x.dtype), sin.to(x.dtype))


def pixels(dtype: torch.dtype, length: int) -> Arguments:
    """Hidden states, and rows and columns of their pixels in the same dtype."""
    steps = torch.arange(length)
    return *hidden_states(dtype, length), torch.stack((steps // 20, steps % 20), dim=-1).to(dtype)


class AxesInFloat64(nn.Module):
    """Flux's: nothing is kept; each axis has channels of its own."""

    def __init__(self, axes_dim: tuple[int, ...]) -> None:
        super().__init__()
        self.axes_dim = axes_dim

    def forward(self, ids: torch.Tensor) -> Pair:
        positions = ids.float()
        phases = [
            torch.outer(positions[:, i], 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
            for i, dim in enumerate(self.axes_dim)
        ]
        cos, sin = _pair(torch.cat(phases, dim=-1))
        return cos.float(), sin.float()


@style("library", "2D", "nothing kept", "unharmed", shows="output", inputs=pixels)
class Flux(Projected):
    """Positions come in the dtype of the latents, which holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = AxesInFloat64((4, 12))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        q = self.queries(x)
        return _turned(q.float(), *self.pos_embed(ids)).to(q.dtype)


def _in_float64(dim: int, positions: np.ndarray) -> np.ndarray:
    omega = 1.0 / 10000 ** (np.arange(dim // 2, dtype=np.float64) / (dim / 2.0))
    phase = np.einsum("m,d->md", positions.reshape(-1), omega)
    return np.concatenate([np.sin(phase), np.cos(phase)], axis=1)


@style("library", "3D", "numpy", roundings=2)
class JointVideo(nn.Module):
    """CogVideoX's: frames and pixels in NumPy, written behind the rows of a text."""

    def __init__(self, dim: int = DIM, text: int = 8) -> None:
        super().__init__()
        self.dim, self.text = dim, text
        steps = np.arange(LONGEST, dtype=np.float64)
        parts = [(dim // 4, steps // 20), (3 * dim // 8, steps % 20 // 5 / 1.875), (3 * dim // 8, steps % 5)]
        pe = torch.from_numpy(np.concatenate([_in_float64(d, t) for d, t in parts], axis=-1))
        joint = torch.zeros(1, text + LONGEST, dim, requires_grad=False)
        joint.data[:, text:].copy_(pe)
        self.register_buffer("pos_embedding", joint, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pos_embedding[:, self.text : self.text + x.shape[1]].to(dtype=x.dtype)
