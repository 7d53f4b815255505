"""Tables that a forward has made, of which the constructor knows nothing, are told by asking it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import safe_rope

DIM, WIDTH = 16, 64


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class _Rope(nn.Module):
    cos: Any
    sin: Any

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, DIM, 2).float() / DIM))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.length, self.cos, self.sin = 0, None, None

    def phases(self, length: int, device: torch.device) -> torch.Tensor:
        half = torch.outer(torch.arange(length, device=device).float(), self.inv_freq.float())
        return torch.cat((half, half), -1)


class Grown(_Rope):
    """Grows its tables by length, and returns rows of them."""

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq_len > self.length:
            phases = self.phases(seq_len, x.device)
            self.length, self.cos, self.sin = seq_len, phases.cos(), phases.sin()
        return self.cos[:seq_len].to(x.dtype), self.sin[:seq_len].to(x.dtype)


class HeadsLast(_Rope):
    """Rotates q and k of [batch, length, heads, dim] by tables of the last length."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if q.shape[1] != self.length or self.cos.device != q.device:
            phases = self.phases(q.shape[1], q.device)[None, :, None]
            self.length, self.cos, self.sin = q.shape[1], phases.cos(), phases.sin()
        turned = [(x * self.cos + _turned(x) * self.sin).to(x.dtype) for x in (q, k)]
        return turned[0], turned[1]


class Assigned(_Rope):
    """Assigns its tables in each forward, as ESM's does."""

    def made(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[-2] != self.length:
            phases = self.phases(x.shape[-2], x.device)[None, None]
            self.length, self.cos, self.sin = x.shape[-2], phases.cos(), phases.sin()
        return self.cos, self.sin

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.cos, self.sin = self.made(k)
        turned = [(x * self.cos + _turned(x) * self.sin).to(x.dtype) for x in (q, k)]
        return turned[0], turned[1]


class Sinusoids(nn.Module):
    """Adds sinusoids that it makes for the longest sequence yet."""

    cos: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, width = x.shape[1:]
        if self.cos is None or len(self.cos) < length:
            frequencies = torch.exp(torch.arange(0, width, 2).float() * (-9.21 / width))
            phases = torch.arange(length).float()[:, None] * frequencies
            self.cos = torch.cat((phases.sin(), phases.cos()), -1)
        return x + self.cos[:length].to(x.dtype)


class Registered(_Rope):
    """Registers buffers in its first forward, of twice the length that is asked for."""

    def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cos is None or len(self.cos) < n:
            phases = self.phases(2 * n, x.device)
            for name in ("cos", "sin"):
                vars(self).pop(name, None)
                self.register_buffer(name, getattr(phases, name)(), persistent=False)
        return self.cos[:n].to(x.dtype), self.sin[:n].to(x.dtype)


class OfPositions(_Rope):
    """Keeps complex numbers for the largest position yet, and gives those of positions."""

    def forward(self, x: torch.Tensor, *, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cos is None or len(self.cos) <= int(position_ids.max()):
            phases = self.phases(int(position_ids.max()) + 1, x.device)[:, : DIM // 2]
            self.cos = torch.polar(torch.ones_like(phases), phases)
        turns = torch.cat((self.cos[position_ids], self.cos[position_ids]), -1)
        return turns.real.to(x.dtype), turns.imag.to(x.dtype)


class Beside(_Rope):
    """Rotates with tables that it keeps beside weights, in a dictionary by length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(DIM, 4 * WIDTH), {}

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if q.shape[1] not in self.kept:
            phases = self.phases(q.shape[1], q.device)[:, None]
            self.kept[q.shape[1]] = phases.cos(), phases.sin()
        cos, sin = self.kept[q.shape[1]]
        turned = [(x * cos + _turned(x) * sin).to(x.dtype) for x in (q, k)]
        return turned[0], turned[1]


class OfActivations(_Rope):
    """Makes a table of what it is given: nobody else can make it again."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.cos = (self.phases(q.shape[1], q.device)[None, :, None] * q.mean()).cos()
        return (q * self.cos).to(q.dtype), (k * self.cos).to(k.dtype)


class Layer(nn.Module):
    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.rope = nn.Linear(WIDTH, WIDTH), cls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if isinstance(self.rope, Sinusoids):
            return self.rope(x)  # type: ignore[no-any-return]
        x = x.unflatten(-1, (-1, DIM))
        if isinstance(self.rope, Grown | Registered | OfPositions):
            positions = torch.arange(x.shape[1])
            takes = isinstance(self.rope, OfPositions)
            tables = self.rope(x, position_ids=positions) if takes else self.rope(x, x.shape[1])
            cos, sin = (table[None, :, None] for table in tables)
            return (x * cos + _turned(x) * sin).flatten(-2)
        if isinstance(self.rope, Assigned):
            q, k = self.rope(x.transpose(1, 2), x.transpose(1, 2))
            return (q + k).transpose(1, 2).flatten(-2)
        q, k = self.rope(x, x)
        return (q + k).flatten(-2)


def _layer(cls: type[nn.Module]) -> tuple[Layer, torch.Tensor]:
    torch.manual_seed(0)
    layer, x = Layer(cls), torch.randn(1, 300, WIDTH)
    layer(x)
    return layer, x


MAKERS = [Grown, HeadsLast, Assigned, Sinusoids, Registered, OfPositions, Beside]


@pytest.mark.parametrize("cls", MAKERS)
def test_what_a_forward_has_made_is_what_it_makes_again(cls: type[nn.Module]) -> None:
    layer, _ = _layer(cls)
    report = safe_rope.audit(layer)
    assert report.verdict == "ok", report.findings


@pytest.mark.parametrize("cls", [Grown, HeadsLast, Assigned, Sinusoids, Registered])
def test_what_is_no_longer_as_made_is_not_right(cls: type[nn.Module]) -> None:
    layer, _ = _layer(cls)
    made: Any = layer.rope.cos
    of_low_phases = made.acos().bfloat16().float().cos()
    for other in (made.bfloat16().float(), made * 1.001, made.roll(1), of_low_phases):
        layer.rope.cos = other
        assert safe_rope.audit(layer).verdict in ("unknown", "damaged")
    layer.rope.cos = made.clone()
    assert safe_rope.audit(layer).verdict == "ok"


def test_what_comes_from_activations_stays_unknown() -> None:
    layer, _ = _layer(OfActivations)
    assert safe_rope.audit(layer).verdict == "unknown"


@pytest.mark.parametrize("cls", MAKERS)
@pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")
def test_protecting_after_a_run_is_as_good_as_before(cls: type[nn.Module]) -> None:
    layer, x = _layer(cls)
    other, _ = _layer(cls)
    other.rope = cls()
    for one in (layer, other):
        safe_rope.protect(one)
        one.to(torch.bfloat16)
    for length in (300, 150, 290, 300):
        low = x[:, :length].bfloat16()
        assert torch.equal(layer(low), other(low))
    longer = torch.randn(1, 900, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(layer(longer), other(longer))
    assert safe_rope.audit(layer).verdict == "ok"


class TurnsAsFlashAttentionDoes(nn.Module):
    """Keeps cos and sin of the last length, and turns [batch, tokens, heads, width]."""

    largest = 0

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", rates, persistent=False)
        self._length = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if q.shape[1] > self._length or self._cos_cached is None:
            self._length = q.shape[1]
            phases = torch.outer(torch.arange(self._length, dtype=torch.float32), self.inv_freq.float())
            self._cos_cached, self._sin_cached = phases.cos().to(q.dtype), phases.sin().to(q.dtype)
        return self._turned(q), self._turned(k)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        assert self._cos_cached is not None
        assert self._sin_cached is not None
        cos, sin = (one[: x.shape[1], None].repeat(1, 1, 2) for one in (self._cos_cached, self._sin_cached))
        turned = x * cos
        type(self).largest = max(self.largest, turned.numel())
        first, second = x.chunk(2, -1)
        return turned + torch.cat((-second, first), -1) * sin


def test_a_module_is_asked_for_its_cache_with_no_square_of_the_length() -> None:
    module = TurnsAsFlashAttentionDoes().to(torch.bfloat16)
    x = torch.zeros(1, 2048, 2, 16, dtype=torch.bfloat16)
    module(x, x)
    TurnsAsFlashAttentionDoes.largest = 0
    report = safe_rope.audit(module)
    assert report.verdict == "damaged"
    assert TurnsAsFlashAttentionDoes.largest <= 2**22
