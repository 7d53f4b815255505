"""NTK and interpolation in each of the ways in which it is put in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from styles.formulas import Pair, half_width, twice
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, LONGEST, style


class Rope(nn.Module):
    """What is scaled here."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("scaling", "ntk", "rebound", inv_freq="inv_freq", exact=half_width)
class BaseRebound(Rope):
    def __init__(self, dim: int = DIM, base: float = 1e4, a: float = 4.0) -> None:
        base = base * a ** (dim / (dim - 2))
        super().__init__(dim, base)


@style("scaling", "ntk", "rebound", inv_freq="inv_freq", exact=half_width)
class BaseReboundAndKept(Rope):
    """The attribute has the argument's name and the scaled value."""

    def __init__(self, dim: int = DIM, base: float = 1e4, alpha: float = 8.0) -> None:
        base = base * alpha ** (dim / (dim - 2))
        super().__init__(dim, base=base)
        self.dim, self.base, self.alpha = dim, base, alpha


@style("scaling", "kwargs", inv_freq="inv_freq", exact=half_width)
class ScalePopped(Rope):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("scale", 4.0)
        scale = kwargs.pop("scale", 1.0)
        super().__init__(*args, **kwargs)
        self.inv_freq /= scale


@style("scaling", "kwargs", inv_freq="inv_freq", exact=half_width)
def scale_given() -> nn.Module:
    """The popped argument comes from the caller."""
    return ScalePopped(DIM, base=1e4, scale=8.0)


@style("scaling", "after super", inv_freq="inv_freq", exact=half_width)
class DividedAfterSuper(Rope):
    def __init__(self, dim: int = DIM, factor: float = 4.0) -> None:
        super().__init__(dim)
        self.inv_freq = self.inv_freq / factor


@style("scaling", "parent", inv_freq="rope.inv_freq", exact=half_width)
class ParentDivides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()
        self.rope.inv_freq = self.rope.inv_freq / 4

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


@style("scaling", "parent", "in place", inv_freq="rope.inv_freq", exact=half_width)
class ParentDividesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()
        self.rope.inv_freq.div_(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rope(x)


@style("scaling", "user", inv_freq="1.inv_freq", exact=half_width)
def assigned_by_the_user() -> nn.Module:
    """The script that builds the model puts other frequencies in."""
    model = nn.Sequential(nn.Identity(), Rope())
    steps = torch.arange(0, DIM, 2, dtype=torch.float32) / DIM
    model[1].inv_freq = 1.0 / 777.0**steps
    return model


@style("scaling", "user", inv_freq="1.inv_freq", exact=half_width)
def registered_anew_by_the_user() -> nn.Module:
    model = nn.Sequential(nn.Identity(), Rope())
    model[1].register_buffer("inv_freq", model[1].inv_freq.clone() * 0.125)
    return model


@style("scaling", "mutated config", inv_freq="inv_freq", exact=half_width)
class ConfigChanged(nn.Module):
    """Each construction multiplies the base that the config holds."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        config = config or SimpleNamespace(base=10000.0, dim=DIM)
        config.base *= 4
        self.config = config
        steps = torch.arange(0, config.dim, 2).float() / config.dim
        self.register_buffer("inv_freq", 1.0 / config.base**steps, persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.arange(x.shape[1]).float()[:, None] * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("scaling", "mutated config", inv_freq="inv_freq", exact=half_width)
def config_given_and_changed() -> nn.Module:
    """The caller's config is changed by the constructor."""
    return ConfigChanged(SimpleNamespace(base=2500.0, dim=DIM))


@style("scaling", "iterator", inv_freq="ropes.1.inv_freq", exact=half_width)
class BasesFromAnIterator(nn.Module):
    """Each rope takes the next base."""

    class Next(Rope):
        """Takes what the iterator has next."""

        def __init__(self, bases: Iterator[float]) -> None:
            super().__init__(DIM, next(bases))

    def __init__(self) -> None:
        super().__init__()
        bases = iter((1e3, 1e4, 1e5, 1e6))
        self.ropes = nn.ModuleList([self.Next(bases), self.Next(bases)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.ropes[1](x)


class TakenFromADict(Rope):
    """The settings are taken out of the dictionary that is handed over."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings.pop("dim"), settings.pop("base"))
        self.left = settings


@style("scaling", "popped dict", inv_freq="inv_freq", exact=half_width)
def dict_popped() -> nn.Module:
    return TakenFromADict({"dim": DIM, "base": 3e4, "name": "rope"})


@style("scaling", "rebound", inv_freq="inv_freq", exact=half_width)
class DimHalved(nn.Module):
    """Channels come in pairs, so the argument is halved first."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        dim //= 2
        self.dim = dim
        self.inv_freq = 1.0 / base ** (torch.arange(dim).float() / dim)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.to(x.device))
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("scaling", "dim without base", inv_freq="0.inv_freq", exact=half_width)
def base_not_kept() -> nn.Module:
    """It keeps dim and not base, which is not the default one."""

    return nn.Sequential(KeepsDimOnly(DIM, base=5e5))


class KeepsDimOnly(Rope):
    """Says of itself half of what it was built with."""

    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        self.dim = dim


@style("scaling", "ntk by parts", inv_freq="inv_freq", exact=half_width)
class NtkByParts(Rope):
    """Llama 3.1's: long waves are interpolated, short ones kept, those between blended."""

    def __init__(self, dim: int = DIM, factor: float = 8.0, old_length: int = 256) -> None:
        super().__init__(dim, 500000.0)
        wavelength = 2 * math.pi / self.inv_freq
        smooth = ((old_length / wavelength - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        blended = (1 - smooth) * self.inv_freq / factor + smooth * self.inv_freq
        self.register_buffer("inv_freq", blended, persistent=False)


@style("scaling", "dynamic ntk", inv_freq="inv_freq", not_on=("vmap",))
class DynamicNtk(nn.Module):
    """A longer sequence has another base."""

    def __init__(self, dim: int = DIM, max_position_embeddings: int = 512, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.register_buffer("inv_freq", self.frequencies(base), persistent=False)

    def frequencies(self, base: float) -> torch.Tensor:
        return 1.0 / (base ** (torch.arange(0, self.dim, 2).float() / self.dim))

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        if n > self.max_position_embeddings:
            grown = 2.0 * n / self.max_position_embeddings - 1.0
            self.inv_freq = self.frequencies(self.base * grown ** (self.dim / (self.dim - 2)))
        phase = torch.outer(torch.arange(n, dtype=torch.float32), self.inv_freq.float()).repeat(1, 2)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("scaling", "linear", inv_freq="inv_freq")
class PositionsDivided(nn.Module):
    """Interpolation where the positions are counted."""

    def __init__(self, dim: int = DIM, scaling_factor: float = 4.0, length: int = LONGEST) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))
        t = torch.arange(length, dtype=self.inv_freq.dtype) / scaling_factor
        emb = torch.einsum("i,j->ij", t, self.inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", emb.cos()[None, None], persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, None], persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        return self.cos_cached[:, :, :n].to(x.dtype), self.sin_cached[:, :, :n].to(x.dtype)


@style("scaling", "longrope", inv_freq="inv_freq", exact=twice)
class ListedFactors(nn.Module):
    """A factor for each frequency, from a list in the config."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        factors = [1.0 + 0.37 * i for i in range(dim // 2)]
        ext_factors = torch.tensor(factors, dtype=torch.float32)
        steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        self.register_buffer("inv_freq", 1.0 / (ext_factors * 10000.0**steps), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).repeat(1, 2)
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


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


@style("ntk", "unharmed")
class NtkInForward(nn.Module):
    """NTK by hand: a longer sequence makes its own base, the buffer stays."""

    def __init__(self, dim: int = DIM, trained: int = 400, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.trained, self.base = dim, trained, base
        self.register_buffer("inv_freq", self._make(base), persistent=False)

    def _make(self, base: float) -> torch.Tensor:
        return 1.0 / (base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim))

    def forward(self, x: torch.Tensor) -> Pair:
        n = x.shape[1]
        alpha = max(1.0, 2 ** math.ceil(math.log2(n / self.trained) + 1) - 1)
        self.inv_freq = self._make(self.base * alpha ** (self.dim / (self.dim - 2)))
        return _turned(self.inv_freq, x)
