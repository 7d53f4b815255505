"""Styles of a fourth look: where tables are kept, when they are made, and what they are made with."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import ChainMap, UserDict
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from styles.formulas import Pair, half_width, twice
from styles.registry import DIM, LONGEST, hidden_and_positions, style


def _frequencies(dim: int = DIM) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def _turned(inv_freq: torch.Tensor, x: torch.Tensor) -> Pair:
    phase = torch.outer(torch.arange(x.shape[1], device=x.device).float(), inv_freq.float())
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


# ---- nanoGPT forks ----------------------------------------------------------------------------------


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> torch.Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    t = torch.arange(end, device=freqs.device, dtype=torch.float32)
    return torch.polar(torch.ones_like(torch.outer(t, freqs)), torch.outer(t, freqs))


@dataclasses.dataclass
class GPTConfig:
    """What a nanoGPT fork is configured by."""

    block_size: int = LONGEST
    n_embd: int = DIM
    rope_base: float = 10000.0


class Block(nn.Module):
    """Rotates its input by complex phases that it is given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        xc = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(xc * freqs_cis).flatten(-2).type_as(x)


@style("nanogpt", "complex", shows="output")
class NanoWithFreqsCis(nn.Module):
    """The model keeps complex phases as an attribute; blocks rotate by a slice of it."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config or GPTConfig()
        self.blocks = nn.ModuleList([Block(self.config) for _ in range(2)])
        self.freqs_cis = precompute_freqs_cis(self.config.n_embd, self.config.block_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        freqs_cis = self.freqs_cis[: x.shape[1]].to(x.device)
        for block in self.blocks:
            x = block(x, freqs_cis)
        return x


@style("nanogpt", inv_freq="inv_freq")
class ModdedNanoRotary(nn.Module):
    """The speedrun's: half of the channels turn; tables are kept for the length of the last call."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.inv_freq = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4, dtype=torch.float32)
        self.inv_freq = torch.cat([self.inv_freq, self.inv_freq.new_zeros(dim // 4)])
        self.seq_len_cached: int | None = None
        self.cos_cached: torch.Tensor | None = None
        self.sin_cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        if x.shape[1] != self.seq_len_cached:
            self.seq_len_cached = x.shape[1]
            t = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)
            freqs = torch.outer(t, self.inv_freq).to(x.device)
            self.cos_cached, self.sin_cached = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
        return self.cos_cached, self.sin_cached


@style("nanogpt", "complex", "lazy", "unharmed")
class PhasorsOnFirstUse(nn.Module):
    """Complex phases are made by ``torch.exp`` when they are first asked for, and kept."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self._cis: torch.Tensor | None = None

    @property
    def cis(self) -> torch.Tensor:
        if self._cis is None:
            angle = torch.outer(torch.arange(LONGEST).float(), _frequencies(self.dim))
            self._cis = torch.exp(1j * angle)
        return self._cis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.cis[: x.shape[1]]).to(x.dtype)


# ---- where they are kept ----------------------------------------------------------------------------

_tables: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("_tables", default=None)


def _forget() -> None:
    _tables.set(None)


@style("context variable", reset=_forget)
class InAContextVariable(nn.Module):
    """Its constructor puts frequencies into a context variable, which forward reads."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        _tables.set({"inv_freq": _frequencies(dim)})

    def forward(self, x: torch.Tensor) -> Pair:
        held = _tables.get()
        assert held is not None
        return _turned(held["inv_freq"], x)


class Tables(NamedTuple):
    """Cos and sin, and the frequencies that they are made of."""

    cos: torch.Tensor
    sin: torch.Tensor
    inv_freq: torch.Tensor


@style("tuple", inv_freq="tables.2")
class InANamedTupleWithFrequencies(nn.Module):
    """Three tensors of a named tuple, moved by the module itself."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        inv_freq = _frequencies(dim)
        phase = torch.outer(torch.arange(LONGEST).float(), inv_freq)
        self.tables = Tables(phase.cos(), phase.sin(), inv_freq)

    def forward(self, x: torch.Tensor) -> Pair:
        self.tables = Tables(*(table.to(x.device) for table in self.tables))
        return self.tables.cos[: x.shape[1]].to(x.dtype), self.tables.sin[: x.shape[1]].to(x.dtype)


@style("mapping")
class InAUserDict(nn.Module):
    """A mapping of the standard library's that is no dict."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.tables = UserDict(inv_freq=_frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.tables["inv_freq"], x)


@style("mapping")
class InAChainMap(nn.Module):
    """Two dictionaries after each other."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.tables = ChainMap({}, {"inv_freq": _frequencies(dim)})

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.tables["inv_freq"], x)


@style("nested")
class InADictOfDicts(nn.Module):
    """By kind of attention, two levels deep."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rope = {"local": {"inv_freq": _frequencies(dim)}, "global": {"inv_freq": _frequencies(dim) / 8}}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*_turned(self.rope["local"]["inv_freq"], x), *_turned(self.rope["global"]["inv_freq"], x))


@style("nested", "buffer")
class BuffersInABareModuleList(nn.Module):
    """A list of bare modules, each with a buffer, as position holders of a U-Net."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.levels = nn.ModuleList()
        for level in range(2):
            holder = nn.Module()
            holder.register_buffer("inv_freq", _frequencies(dim) / 2**level, persistent=False)
            self.levels.append(holder)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part for level in self.levels for part in _turned(level.inv_freq, x))


class RopeCache:
    """An object that makes tables for a length and keeps the longest."""

    def __init__(self, dim: int) -> None:
        self.inv_freq = _frequencies(dim)
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None

    def get(self, length: int) -> Pair:
        if self.cos is None or self.sin is None or len(self.cos) < length:
            phase = torch.outer(torch.arange(length).float(), self.inv_freq)
            self.cos, self.sin = phase.cos(), phase.sin()
        return self.cos[:length], self.sin[:length]


@style("object", "lazy", inv_freq="cache.inv_freq", exact=half_width)
class CacheObjectThatGrows(nn.Module):
    """A helper object makes its tables when a forward asks."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.cache = RopeCache(dim)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.cache.get(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


@style("function attribute")
class OnAnInnerFunction(nn.Module):
    """The table is an attribute of a function that the constructor defines."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()

        def rotate(x: torch.Tensor) -> Pair:
            return _turned(rotate.inv_freq, x)  # type: ignore[attr-defined]

        rotate.inv_freq = _frequencies(dim)  # type: ignore[attr-defined]
        self.rotate = rotate

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rotate(x)


@style("partial")
class KeywordsOfAPartial(nn.Module):
    """The forward's helper has got its frequencies as a keyword."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rotate = functools.partial(_turned, x=None, inv_freq=_frequencies(dim))

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rotate(x=x)


# ---- when they are made -----------------------------------------------------------------------------


@style("lazy", "__setstate__", inv_freq="inv_freq", exact=half_width)
class MadeInSetstate(nn.Module):
    """Makes its frequencies anew after unpickling; nobody unpickles it here."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state["_buffers"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.register_buffer("inv_freq", _frequencies(self.dim), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


class Initialised(nn.Module):
    """A base that calls ``post_init`` of its class, which initialises every part."""

    def post_init(self) -> None:
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        raise NotImplementedError


class BareRope(nn.Module):
    """Has room for frequencies."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", torch.empty(dim // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("filled later", inv_freq="rope.inv_freq", exact=half_width)
class FilledByInitWeights(Initialised):
    """Fills its child's frequencies where weights are initialised."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rope = BareRope(dim)
        self.mix = nn.Linear(dim, dim)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BareRope):
            module.inv_freq.copy_(_frequencies(module.dim))
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope(x)


class RopeFactory(nn.Module):
    """Is built by a class method."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @classmethod
    def from_dim(cls, dim: int, base: float = 10000.0) -> RopeFactory:
        return cls(base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("factory", inv_freq="rope.inv_freq", exact=half_width)
class FromAClassMethod(nn.Module):
    """Its parent builds it by a class method that computes the table."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = RopeFactory.from_dim(DIM)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope(x)


@style("attribute", "unharmed")
class MadeInGetattr(nn.Module):
    """A missing attribute is computed."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    def __getattr__(self, name: str) -> Any:
        if name == "inv_freq":
            return _frequencies(self.dim)
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("remembered", "unharmed")
class CachedMethod(nn.Module):
    """``functools.cache`` on a method, whose key is the module."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    @functools.cache  # noqa: B019 - as people write it
    def tables(self, length: int) -> Pair:
        phase = torch.outer(torch.arange(length).float(), _frequencies(self.dim))
        return phase.cos(), phase.sin()

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.tables(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


_SOURCE = """
def inverse_frequencies(dim, base):
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))

def tables(inv_freq, length):
    phase = torch.outer(torch.arange(length).float(), inv_freq.float())
    return phase.cos(), phase.sin()
"""
_generated: dict[str, Any] = {"torch": torch}
exec(_SOURCE, _generated)


@style("generated", inv_freq="inv_freq", exact=half_width)
class GeneratedCode(nn.Module):
    """Its functions are made by ``exec``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _generated["inverse_frequencies"](dim, 10000.0), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = _generated["tables"](self.inv_freq, x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


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


# ---- what they are made with ------------------------------------------------------------------------


@style("vander", inv_freq="inv_freq", exact=half_width)
class ByVander(nn.Module):
    """Powers of one ratio as a row of a Vandermonde matrix."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        ratio = torch.tensor([10000.0 ** (-2.0 / dim)], dtype=torch.float64)
        powers = torch.vander(ratio, dim // 2, increasing=True)[0].float()
        self.register_buffer("inv_freq", powers, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("cumprod", inv_freq="inv_freq", exact=half_width)
class ByCumprod(nn.Module):
    """A running product of one ratio."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        ratios = torch.full((dim // 2,), 10000.0 ** (-2.0 / dim))
        ratios[0] = 1.0
        self.register_buffer("inv_freq", ratios.cumprod(0), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("in place", inv_freq="inv_freq", exact=half_width)
class DividedInPlace(nn.Module):
    """``arange(...).div_().mul_().exp_()``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        steps = torch.arange(0, dim, 2, dtype=torch.float32).div_(dim).mul_(-math.log(10000.0)).exp_()
        self.register_buffer("inv_freq", steps, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("pow", inv_freq="inv_freq", exact=half_width)
class BaseAsATensor(nn.Module):
    """A tensor is raised to powers, and another of the same size divides."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        base = torch.tensor(10000.0)
        inv_freq = torch.ones(dim // 2) / torch.pow(base, torch.linspace(0, 1 - 2 / dim, dim // 2))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("cumsum", exact=half_width, inv_freq="inv_freq")
class CountedByFullAndCumsum(nn.Module):
    """Positions are a running sum of ones, and buffers too."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)
        self.register_buffer("t", torch.full((LONGEST,), 1.0).cumsum(0) - 1, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.einsum("i,j->ij", self.t[: x.shape[1]].float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("numpy", inv_freq="inv_freq")
class FromNumpyInDouble(nn.Module):
    """float64 frequencies of NumPy, kept as float64."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        values = np.power(10000.0, -np.arange(0, dim, 2, dtype=np.float64) / dim)
        self.register_buffer("inv_freq", torch.from_numpy(values), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).double()[:, None] * self.inv_freq[None]
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("python", "buffer")
class LoopsOfMath(nn.Module):
    """tensor2tensor's as a loop over ``math.sin``; few columns, as each number takes its time."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        table = torch.zeros(LONGEST, dim)
        for pos in range(LONGEST):
            for i in range(0, dim, 2):
                angle = pos / 10000 ** (i / dim)
                table[pos, i] = math.sin(angle)
                table[pos, i + 1] = math.cos(angle)
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]].to(x.dtype)


@style("fp16 on purpose")
class HalfOnPurpose(nn.Module):
    """Its author casts the frequencies to FP16 and computes with them so."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim).half().float(), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("fp16 on purpose")
class KeptInHalf(nn.Module):
    """Tables are cast to FP16 by the author, and read as FP32."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(LONGEST).float(), _frequencies(dim))
        self.cos, self.sin = phase.cos().half(), phase.sin().half()

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].float().to(x.dtype), self.sin[: x.shape[1]].float().to(x.dtype)


# ---- formulas ---------------------------------------------------------------------------------------


@style("yarn", inv_freq="inv_freq", exact=half_width)
class YarnByHand(nn.Module):
    """YaRN's ramp in torch, with the attention factor beside."""

    def __init__(self, dim: int = DIM, base: float = 10000.0, scale: float = 4.0) -> None:
        super().__init__()
        freqs = base ** (torch.arange(0, dim, 2).float() / dim)
        low, high = self._at(32, dim, base), self._at(1, dim, base)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        mask = 1 - ramp
        inv_freq = (1 / (scale * freqs)) * (1 - mask) + (1 / freqs) * mask
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @staticmethod
    def _at(rotations: float, dim: int, base: float, longest: int = 256) -> float:
        return (dim * math.log(longest / (rotations * 2 * math.pi))) / (2 * math.log(base))

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


@style("llama3", inv_freq="freqs", exact=half_width)
class LlamaThreeByHand(nn.Module):
    """Meta's ``apply_scaling``: a loop over Python numbers of a tensor."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        freqs = 1.0 / (500000.0 ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
        self.register_buffer("freqs", self.apply_scaling(freqs), persistent=False)

    @staticmethod
    def apply_scaling(freqs: torch.Tensor) -> torch.Tensor:
        new_freqs = []
        for freq in freqs:
            wavelen = 2 * math.pi / freq
            if wavelen < 256 / 4:
                new_freqs.append(freq)
            elif wavelen > 256:
                new_freqs.append(freq / 8)
            else:
                smooth = (256 / wavelen - 1) / 3
                new_freqs.append((1 - smooth) * freq / 8 + smooth * freq)
        return torch.tensor(new_freqs, dtype=freqs.dtype, device=freqs.device)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.freqs, x)


@style("partial", "interpolated", inv_freq="inv_freq")
class PartialRotaryWithOnes(nn.Module):
    """Channels that do not turn have cos 1 and sin 0 in the same table."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rotary = dim // 2
        self.register_buffer("inv_freq", _frequencies(self.rotary) / 2, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).repeat(1, 2)
        cos = F.pad(phase.cos(), (0, x.shape[-1] - self.rotary), value=1.0)
        sin = F.pad(phase.sin(), (0, x.shape[-1] - self.rotary))
        return cos.to(x.dtype), sin.to(x.dtype)


@style("xpos", roundings=2, inv_freq="inv_freq")
class XPosOfLucidrains(nn.Module):
    """Frequencies and a scale that is raised to powers of positions."""

    def __init__(self, dim: int = DIM, scale_base: int = 512) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))
        self.scale_base = scale_base
        self.register_buffer("scale", (torch.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)
        phase = torch.einsum("i , j -> i j", t, self.inv_freq)
        power = (torch.arange(x.shape[1], device=x.device) - (x.shape[1] // 2)) / self.scale_base
        scale = self.scale ** power[:, None]
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype), scale.to(x.dtype)


@style("hope", inv_freq="inv_freq")
class HighFrequenciesOnly(nn.Module):
    """HoPE's: what turns less than once in the trained length does not turn at all."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        inv_freq = _frequencies(dim)
        inv_freq = torch.where(inv_freq * LONGEST > 2 * math.pi, inv_freq, torch.zeros(()))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.inv_freq, x)


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


@style("twice", exact=twice, inv_freq="rotary_emb.inv_freq", widens=True)
class EsmRotary(nn.Module):
    """ESM-2 of fair-esm: tables for the longest sequence so far, kept in the dtype that they are made in."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.rotary_emb = EsmRotaryEmbedding(dim)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.rotary_emb(x)
        return cos[0].to(x.dtype), sin[0].to(x.dtype)


class EsmRotaryEmbedding(nn.Module):
    """What `EsmRotary` holds."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)
        self._seq_len_cached: int | None = None
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None

    def _update(self, x: torch.Tensor, seq_dimension: int = 1) -> tuple[Any, Any]:
        seq_len = x.shape[seq_dimension]
        if seq_len != self._seq_len_cached or self._cos_cached.device != x.device:  # type: ignore[union-attr]
            self._seq_len_cached = seq_len
            t = torch.arange(x.shape[seq_dimension], device=x.device).type_as(self.inv_freq)
            freqs = torch.einsum("i,j->ij", t, self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1).to(x.device)
            self._cos_cached = emb.cos()[None, :, :]
            self._sin_cached = emb.sin()[None, :, :]
        return self._cos_cached, self._sin_cached

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        return self._update(x)
