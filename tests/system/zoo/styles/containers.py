"""Tables in lists, dictionaries and namespaces."""

from __future__ import annotations

import enum
import types
from collections import ChainMap, UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from styles.formulas import Pair, half_width
from styles.formulas import frequencies as _frequencies
from styles.formulas import turned_in_fp32 as _turned
from styles.registry import DIM, LONGEST, style


def frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))


def tables(dim: int, length: int, base: float = 10000.0) -> Pair:
    phase = torch.outer(torch.arange(length).float(), frequencies(dim, base))
    return phase.cos(), phase.sin()


@style("container")
class TablesInAList(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.cache = [*tables(dim, length)]

    def forward(self, x: torch.Tensor) -> Pair:
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in self.cache)
        return cos, sin


@style("container")
class TablesInATuple(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.freqs = tables(dim, length)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.freqs[0][: x.shape[1]].to(x), self.freqs[1][: x.shape[1]].to(x)


@style("container", inv_freq="rope.inv_freq", exact=half_width)
class TablesInADict(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        cos, sin = tables(dim, length)
        self.rope = {"inv_freq": frequencies(dim), "cos": cos, "sin": sin}

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope["cos"][: x.shape[1]].to(x.dtype), self.rope["sin"][: x.shape[1]].to(x.dtype)


@style("container")
class TablesInANamespace(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        cos, sin = tables(dim, length)
        self.rope = SimpleNamespace(cos=cos, sin=sin, dim=dim)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rope.cos[: x.shape[1]].to(x.dtype), self.rope.sin[: x.shape[1]].to(x.dtype)


class Rows:
    """A plain object that keeps both tables and hands out rows of them."""

    def __init__(self, dim: int, length: int) -> None:
        self.cos, self.sin = tables(dim, length)

    def upto(self, x: torch.Tensor) -> Pair:
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)


@style("container")
class TablesInAnObject(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.rows = Rows(dim, length)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.rows.upto(x)


class CosSinPair(NamedTuple):
    """Both tables by name."""

    cos: torch.Tensor
    sin: torch.Tensor


@style("container")
class TablesInANamedTuple(nn.Module):
    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        self.pair = CosSinPair(*tables(dim, length))

    def forward(self, x: torch.Tensor) -> CosSinPair:
        return CosSinPair(self.pair.cos[: x.shape[1]].to(x.dtype), self.pair.sin[: x.shape[1]].to(x.dtype))


@style("container", "nested")
class TablesByLayerType(nn.Module):
    """A dictionary of dictionaries: short-sighted layers have another base."""

    def __init__(self, dim: int = DIM, length: int = LONGEST) -> None:
        super().__init__()
        bases = {"sliding": 10000.0, "full": 1000000.0}
        self.tables = {
            kind: dict(zip(("cos", "sin"), tables(dim, length, base), strict=True))
            for kind, base in bases.items()
        }

    def forward(self, x: torch.Tensor) -> dict[str, Pair]:
        return {
            kind: (pair["cos"][: x.shape[1]].to(x.dtype), pair["sin"][: x.shape[1]].to(x.dtype))
            for kind, pair in self.tables.items()
        }


@style("container", "buffer", inv_freq="full_inv_freq")
class BuffersByLayerType(nn.Module):
    """Buffers whose names are put together in a loop."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.kinds = ("sliding", "full")
        for kind, base in zip(self.kinds, (1e4, 1e6), strict=True):
            self.register_buffer(f"{kind}_inv_freq", frequencies(dim, base), persistent=False)

    def forward(self, x: torch.Tensor) -> list[Pair]:
        answers = []
        for kind in self.kinds:
            phase = torch.outer(torch.arange(x.shape[1]).float(), getattr(self, f"{kind}_inv_freq").float())
            answers.append((phase.cos().to(x.dtype), phase.sin().to(x.dtype)))
        return answers


class Axis(nn.Module):
    """One of several in a list."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(dim, base), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        phase = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float())
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


@style("container", "module list", inv_freq="ropes.1.inv_freq")
class RopesInAModuleList(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.ropes = nn.ModuleList(Axis(dim, 10.0**power) for power in (3, 4))

    def forward(self, x: torch.Tensor) -> list[Any]:
        return [rope(x) for rope in self.ropes]


class Sight(enum.Enum):
    """How far a layer sees."""

    NEAR = 1
    FAR = 2


@style("container", "enum")
class TablesByEnum(nn.Module):
    """The keys are no strings."""

    def __init__(self) -> None:
        super().__init__()
        self.cosines = {}
        for sight, base in zip(Sight, (1e4, 1e6), strict=True):
            inv = 1.0 / base ** (torch.arange(0, DIM, 2) / DIM)
            self.cosines[sight] = (torch.arange(0.0, LONGEST)[:, None] * inv).cos()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.cosines[sight][: x.shape[1]].to(x.dtype) for sight in Sight]


@style("container", "nested", "complex")
class PhasorsByLength(nn.Module):
    """Complex phases in a tuple in a dictionary, by the exponential of an imaginary number."""

    def __init__(self) -> None:
        super().__init__()
        phase = torch.arange(0.0, LONGEST)[:, None] / 10000 ** (torch.arange(0, DIM, 2) / DIM)
        self.tables = {LONGEST: (torch.exp(1j * phase),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tables[LONGEST][0][: x.shape[1]]


class Registry(dict):  # type: ignore[type-arg]
    """A dictionary of a class of its own."""


@style("container", "hidden module", inv_freq="registry.rope.inv_freq", exact=half_width)
class RopeHiddenFromTheModule(nn.Module):
    """A rope in a dictionary that is no ModuleDict: no cast reaches it, and nobody lists it."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.registry = Registry(rope=Axis(dim, 10000.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.registry["rope"](x)


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


class _Frozen(Mapping[str, torch.Tensor]):
    """A read-only mapping, as of a config library."""

    def __init__(self, **values: torch.Tensor) -> None:
        self._values = values

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@style("mapping")
class InAReadOnlyMapping(nn.Module):
    """A mapping of the author's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = _Frozen(inv_freq=_frequencies())

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.tables["inv_freq"], x)


@style("mapping")
class InAMappingProxy(nn.Module):
    """``types.MappingProxyType`` around a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = types.MappingProxyType({"inv_freq": _frequencies()})

    def forward(self, x: torch.Tensor) -> Pair:
        return _turned(self.tables["inv_freq"], x)


@style("dataclass", "nested")
class InADataclassWithAList(nn.Module):
    """A dataclass keeps tables of several resolutions in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cached([_frequencies() / scale for scale in (1, 2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part for table in self.cache.tables for part in _turned(table, x))


@dataclass
class Cached:
    """Tables, and a name."""

    tables: list[torch.Tensor] = field(default_factory=list)
    name: str = "rope"
