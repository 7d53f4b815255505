"""Tables that are remembered somewhere else than in the module, or made longer when they have to be."""

from __future__ import annotations

import functools
import weakref
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import nn

from styles.formulas import Pair, half_width, twice
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, LONGEST, style


@style("cache", "growing", inv_freq="inv_freq", exact=twice)
class GrownInTheDtypeOfX(nn.Module):
    """Llama 4.35: a cache of 64 rows that forward makes anew, in the dtype of x."""

    def __init__(self, dim: int = DIM, max_position_embeddings: int = 64, base: int = 10000) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2).float() / self.dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._set_cos_sin_cache(max_position_embeddings, self.inv_freq.device, torch.get_default_dtype())

    def _set_cos_sin_cache(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self.max_seq_len_cached = seq_len
        t = torch.arange(self.max_seq_len_cached, device=device, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        seq_len = x.shape[1]
        if seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len, x.device, x.dtype)
        return self.cos_cached[:seq_len].to(dtype=x.dtype), self.sin_cached[:seq_len].to(dtype=x.dtype)


@style("cache", "growing", inv_freq="inv_freq", exact=twice)
class RememberedFromTheFirstForward(nn.Module):
    """As GPT-NeoX: made by the first forward, kept as attributes until a longer one comes."""

    def __init__(self, dim: int = DIM, base: int = 10000) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)))
        self.seq_len_cached: int | None = None
        self.cos_cached: torch.Tensor | None = None
        self.sin_cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        seq_len = x.shape[1]
        if seq_len != self.seq_len_cached:
            self.seq_len_cached = seq_len
            t = torch.arange(seq_len, device=x.device).type_as(self.inv_freq)
            freqs = torch.einsum("i,j->ij", t, self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1).to(x.device)
            self.cos_cached, self.sin_cached = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        return self.cos_cached, self.sin_cached


@style("cache", "class", reset=lambda: CacheOnTheClass.cache.clear())
class CacheOnTheClass(nn.Module):
    """All instances share what the first of them has made."""

    cache: ClassVar[dict[tuple[int, int], Pair]] = {}

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.key = dim, length
        if self.key not in self.cache:
            phase = torch.arange(0.0, length)[:, None] * 10000 ** -(torch.arange(0, dim, 2) / dim)
            self.cache[self.key] = phase.cos(), phase.sin()

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.cache[self.key]
        return cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype)


def forget_the_table() -> None:
    TensorOnTheClass.table = None


@style("cache", "class", reset=forget_the_table)
class TensorOnTheClass(nn.Module):
    table: ClassVar[torch.Tensor | None] = None

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        if TensorOnTheClass.table is None:
            TensorOnTheClass.table = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)

    def forward(self, x: torch.Tensor) -> Pair:
        assert self.table is not None
        phase = self.table[: x.shape[1]].float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


TABLES: dict[Any, Any] = {}


@style("cache", "global", reset=TABLES.clear)
class GlobalCache(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.dim, self.length = dim, length
        if (dim, length) not in TABLES:
            freqs = torch.pow(10000.0, -torch.arange(0, dim, 2) / dim)
            phase = torch.arange(0.0, length).unsqueeze(1) * freqs
            TABLES[dim, length] = torch.cat((phase.cos(), phase.sin()), dim=-1)

    def forward(self, x: torch.Tensor) -> Any:
        return TABLES[self.dim, self.length][: x.shape[1]].to(x.dtype)


@style("cache", "by dtype")
class CacheByDtype(nn.Module):
    """For each length and dtype what was counted in it, made in forward."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.cache: dict[tuple[int, torch.dtype], Pair] = {}

    def forward(self, x: torch.Tensor) -> Pair:
        key = x.shape[1], x.dtype
        if key not in self.cache:
            freqs = 10000.0 ** -(torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
            t = torch.arange(x.shape[1], dtype=x.dtype)
            phase = torch.outer(t, freqs.to(x.dtype))
            self.cache[key] = phase.cos(), phase.sin()
        return self.cache[key]


@style("cache", "by dtype", "global", reset=lambda: BY_DTYPE.clear())
class GlobalCacheByDtype(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> Pair:
        key = self.dim, x.shape[1], x.dtype
        if key not in BY_DTYPE:
            t = torch.arange(0, x.shape[1], dtype=x.dtype)
            freqs = 1.0 / 10000 ** (torch.arange(0, self.dim, 2, dtype=x.dtype) / self.dim)
            BY_DTYPE[key] = torch.outer(t, freqs).cos(), torch.outer(t, freqs).sin()
        cos, sin = BY_DTYPE[key]
        return cos, sin


BY_DTYPE: dict[Any, Pair] = {}


@functools.lru_cache(maxsize=8)
def remembered(dim: int, length: int, base: float) -> Pair:
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2) / dim)
    phase = torch.arange(0.0, length)[:, None] * inv_freq
    return phase.cos(), phase.sin()


@style("cache", "lru_cache", reset=remembered.cache_clear)
class RememberingFunction(nn.Module):
    """The constructor asks a function that remembers; every layer holds the same tensors."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.cos, self.sin = remembered(dim, length, 10000.0)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


@style("cache", "lru_cache", "global", reset=remembered.cache_clear)
class RememberingFunctionAlone(nn.Module):
    """Nothing of it is held by the module; the constructor only warms the cache."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.dim, self.length = dim, length
        remembered(dim, length, 500.0)

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = remembered(self.dim, self.length, 500.0)
        return cos[: x.shape[1]].to(x.dtype), sin[: x.shape[1]].to(x.dtype)


@style("cache", "lru_cache", inv_freq="inv_freq", exact=half_width)
class RememberingMethod(nn.Module):
    """A method remembers for each length; its table is made of whatever inv_freq is by then."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    @functools.lru_cache(maxsize=4)  # noqa: B019 as many people write it
    def rows(self, length: int) -> Pair:
        phase = torch.outer(torch.arange(length).to(self.inv_freq), self.inv_freq)
        return phase.cos(), phase.sin()

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = self.rows(x.shape[1])
        return cos.to(x.dtype), sin.to(x.dtype)


def sinusoids(length: int, dim: int) -> torch.Tensor:
    """Remember the last table as an attribute of the function."""
    cached: Any = getattr(sinusoids, "table", None)
    if cached is None or len(cached) < length:
        angle = torch.arange(0.0, length)[:, None] / 10000 ** (torch.arange(0.0, dim, 2) / dim)
        cached = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
        sinusoids.table = cached  # type: ignore[attr-defined]
    return cached[:length]


@style("cache", "function", reset=lambda: vars(sinusoids).clear())
class RememberedByAFunction(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.dim = dim
        sinusoids(length, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sinusoids(x.shape[1], self.dim).to(x.dtype)


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


_OWNERS: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


@style("weakref")
class InAWeakDictionary(nn.Module):
    """Its frequencies are in a weak dictionary of the file."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        _OWNERS[self] = _frequencies(dim)

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(_OWNERS[self], x)
