"""Forwards that change what they, their arguments or their children keep: each call counts once."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from styles.formulas import Pair
from styles.registry import DIM, LONGEST, hidden_states, style


def _frequencies(dim: int) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)


def _wave(inv_freq: torch.Tensor, x: torch.Tensor, first: Any = 0) -> Pair:
    positions = torch.arange(x.shape[1]).to(inv_freq) + first
    phase = torch.outer(positions, inv_freq)
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class _Counting(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("inv_freq", _frequencies(dim), persistent=False)


@style("stateful", inv_freq="inv_freq", not_on=("meta",))
class CountsInABuffer(_Counting):
    """A counter of calls as an integer buffer, written in place."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls += 1
        return *_wave(self.inv_freq, x), self.calls.clone()


@style("stateful", inv_freq="inv_freq")
class CountsInAnAttribute(_Counting):
    """A tensor that is no buffer, written in place."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.seen = torch.zeros(1, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.seen.add_(x.shape[1])
        return *_wave(self.inv_freq, x), self.seen.clone()


@style("stateful", inv_freq="inv_freq", not_on=("meta",))
class ContinuesWhereItWas(_Counting):
    """Streaming: the positions go on from the last call."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.register_buffer("offset", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> Pair:
        wave = _wave(self.inv_freq, x, self.offset.to(self.inv_freq))
        self.offset += x.shape[1]
        return wave


@style("stateful", inv_freq="inv_freq")
class ContinuesANumber(_Counting):
    """Streaming, with a Python number."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.offset = 0

    def forward(self, x: torch.Tensor) -> Pair:
        wave = _wave(self.inv_freq, x, self.offset)
        self.offset += x.shape[1]
        return wave


class _Tracker:
    def __init__(self) -> None:
        self.calls = 0
        self.lengths: list[int] = []

    def note(self, length: int) -> int:
        self.calls += 1
        self.lengths.append(length)
        return self.calls * 1000 + len(self.lengths)


@style("stateful", inv_freq="inv_freq")
class CountsInAnObject(_Counting):
    """A plain object counts the calls."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.tracker = _Tracker()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *_wave(self.inv_freq, x), torch.tensor(self.tracker.note(x.shape[1]))


@style("stateful", inv_freq="inv_freq")
class CountsInNestedLists(_Counting):
    """A list in a dictionary, two levels down."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.history: dict[str, list[int]] = {"lengths": []}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.history["lengths"].append(x.shape[1])
        return *_wave(self.inv_freq, x), torch.tensor(self.history["lengths"])


@style("stateful", inv_freq="inv_freq")
class CountsWithAnIterator(_Counting):
    """`itertools.count` says how many calls there were."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.counter = itertools.count()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *_wave(self.inv_freq, x), torch.tensor(next(self.counter))


def _offsets() -> Iterator[int]:
    offset = 0
    while True:
        yield offset
        offset += 7


@style("stateful", inv_freq="inv_freq")
class AsksAGenerator(_Counting):
    """A Python generator, which nobody can copy, gives each call's first position."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.offsets = _offsets()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first = next(self.offsets)
        return *_wave(self.inv_freq, x, first), torch.tensor(first)


@style("stateful", inv_freq="inv_freq")
class DrawsItsFirstPosition(_Counting):
    """Random offsets from a generator that the module has for itself."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first = int(torch.randint(0, 20, (1,), generator=self.generator))
        return *_wave(self.inv_freq, x, first), torch.tensor(first)


def _with_a_cache(dtype: torch.dtype, length: int) -> tuple[Any, ...]:
    return (*hidden_states(dtype, length), {"lengths": [], "sum": torch.zeros(1, dtype=torch.int64)})


@style("stateful", inv_freq="inv_freq", inputs=_with_a_cache)
class WritesToItsArguments(_Counting):
    """A cache that is handed in is made longer."""

    def forward(
        self, x: torch.Tensor, cache: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        cache["lengths"].append(x.shape[1])
        cache["sum"] += x.shape[1]
        return *_wave(self.inv_freq, x), torch.tensor(cache["lengths"]), cache["sum"].clone()


class _Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.count = 0

    def forward(self) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        return self.calls * 1000 + self.count


@style("stateful", inv_freq="inv_freq", not_on=("meta",))
class ItsChildCounts(_Counting):
    """A child module, and what it keeps."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.counter = _Calls()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *_wave(self.inv_freq, x), self.counter()


@style("stateful", not_on=("meta",))
class CountsBesideATable(nn.Module):
    """A finished table and a counter."""

    def __init__(self, dim: int = DIM, longest: int = LONGEST) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(longest).float(), _frequencies(dim))
        self.register_buffer("cos", phase.cos(), persistent=False)
        self.register_buffer("sin", phase.sin(), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls += 1
        return self.cos[: x.shape[1]].to(x), self.sin[: x.shape[1]].to(x), self.calls.clone()


@style("stateful", inv_freq="inv_freq", not_on=("meta",))
class GrowsAndCounts(_Counting):
    """A cache that forward makes anew, and a counter that is written in place."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.make(64, torch.get_default_dtype())

    def make(self, length: int, dtype: torch.dtype) -> None:
        phase = torch.outer(torch.arange(length).to(self.inv_freq), self.inv_freq)
        self.register_buffer("cos_cached", phase.cos().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if x.shape[1] > len(self.cos_cached):
            self.make(x.shape[1], x.dtype)
        return self.cos_cached[: x.shape[1]].to(x.dtype), self.calls.clone()


@style("stateful", inv_freq="inv_freq")
class HasSlots(_Counting):
    """What it counts is in a slot, which no ``__dict__`` holds."""

    __slots__ = ("calls",)

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        object.__setattr__(self, "calls", 0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        object.__setattr__(self, "calls", self.calls + 1)
        return *_wave(self.inv_freq, x), torch.tensor(self.calls)


@style("stateful", inv_freq="rope.inv_freq", shows="output")
def llama_that_counts() -> nn.Module:
    """Llama's rotary module in a class of one's own that counts."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    by_length = "position_ids" not in inspect.signature(llama.LlamaRotaryEmbedding.forward).parameters

    class CountedRotary(llama.LlamaRotaryEmbedding):
        def __init__(self) -> None:
            config = LlamaConfig(hidden_size=DIM, num_attention_heads=1, max_position_embeddings=LONGEST)
            super().__init__(*(DIM, LONGEST) if by_length else (config,))
            self.calls = 0

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().forward(x, *args, **kwargs)

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = CountedRotary()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            positions = torch.arange(x.shape[1])[None]
            if by_length:
                cos, sin = self.rope(x, seq_len=x.shape[1])
                q, k = llama.apply_rotary_pos_emb(x[:, None], x[:, None], cos, sin, positions)
            else:
                cos, sin = self.rope(x, positions)
                q, k = llama.apply_rotary_pos_emb(x[:, None], x[:, None], cos, sin)
            return q + k, torch.tensor(self.rope.calls)

    return Counted()
