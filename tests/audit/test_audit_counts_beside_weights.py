"""Counts that reach what a module returns through its weights alone: a call whose counts are exact tells."""

from __future__ import annotations

import math

import pytest
import torch
from audited import Model
from torch import Tensor, nn
from torch.nn import functional as F

import safe_rope

BF16, FP32 = torch.bfloat16, torch.float32
DIM, HEADS, N = 32, 4, 300


class Counts(nn.Module):
    """Counts in FP32, or in the dtype of what it is given."""

    wide = True

    def counts(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=FP32 if self.wide else x.dtype)

    def apart(self, x: Tensor) -> Tensor:
        counts = self.counts(x)
        return counts[:, None] - counts


class Alibi(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.slopes = [2.0 ** -(2 * i + 2) for i in range(HEADS)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        slopes = torch.tensor(self.slopes)[:, None, None]
        bias = (-slopes * self.apart(x).abs()).to(x.dtype)
        scores = q @ k.mT / math.sqrt(DIM // HEADS) + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Bins(Counts):
    """Relative positions as OpenFold has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(65, DIM)

    def forward(self, x: Tensor) -> Tensor:
        bins = torch.arange(-32, 33)
        nearest = (self.apart(x).clamp(-32, 32)[..., None] - bins).abs().argmin(-1)
        return self.linear(F.one_hot(nearest, 65).to(x.dtype))


class Clamped(Counts):
    """Relative positions as ESMFold has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(66, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((self.apart(x).clamp(-32, 32) + 33).long())


class Buckets(Counts):
    """Relative positions as T5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.query = nn.Embedding(32, HEADS), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        apart = self.apart(x).abs()
        far = 8 + torch.log(apart.float() / 8) / math.log(16) * 8
        return self.bias(torch.where(apart < 8, apart, far.clamp(max=31)).long())


class Coordinates(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        apart = self.apart(x)
        return self.mlp((apart.sign() * (apart.abs() + 1).log2())[..., None].to(x.dtype))


class OfAMask(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4096, DIM)

    def counts(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=FP32 if self.wide else x.dtype)
        return mask.cumsum(1) - 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(self.counts(x).long())


class Decay(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        decay = (0.98 ** self.apart(x).clamp(min=0)).tril().to(x.dtype)
        return (self.q(x) @ self.k(x).mT * decay) @ x


class Given(Counts):
    """Counts that it is given, which it casts to the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(66, DIM)

    def forward(self, residues: Tensor) -> Tensor:
        counts = residues.to(FP32 if self.wide else self.embedding.weight.dtype)
        apart = counts[..., None] - counts[..., None, :]
        return self.embedding((apart.clamp(-32, 32) + 33 + torch.arange(1)).long())


STYLES: list[type[Counts]] = [Alibi, Bins, Clamped, Buckets, Coordinates, OfAMask, Decay, Given]


def part(cls: type[Counts], *, wide: bool) -> nn.Module:
    torch.manual_seed(0)
    return type(cls.__name__, (cls,), {"wide": wide, "__module__": __name__})()


@pytest.mark.parametrize("cls", STYLES)
@pytest.mark.contract
def test_rounded_counts_are_damage_where_weights_take_them(cls: type[Counts]) -> None:
    given = torch.arange(N)[None] if cls is Given else torch.randn(1, N, DIM)
    low = given if cls is Given else given.to(BF16)
    true = part(cls, wide=True)(given)
    off = [(part(cls, wide=wide).to(BF16)(low).float() - true).abs().max() for wide in (False, True)]
    assert off[0] > 2 * off[1]

    report = safe_rope.audit(Model(part(cls, wide=False)).to(BF16))
    assert [(one.path, one.what) for one in report.damaged] == [("part", "forward")]
    assert safe_rope.audit(Model(part(cls, wide=False))).ok
    assert safe_rope.audit(Model(part(cls, wide=True)).to(BF16)).ok


def test_what_holds_too_many_weights_is_unknown_where_its_code_counts_as_it_is_given() -> None:
    class Large(Clamped):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.zeros(2**22, dtype=BF16))

        def counts(self, x: Tensor) -> Tensor:
            return torch.arange(x.shape[1], dtype=x.dtype)

    assert safe_rope.audit(Model(Large()).to(BF16)).verdict == "unknown"
    assert safe_rope.audit(Model(Large()).float()).ok


def test_rounded_counts_that_cannot_be_made_exact_are_unknown() -> None:
    class Strict(Bins):
        def forward(self, x: Tensor) -> Tensor:
            if type(self.counts(x)) is not Tensor:
                raise TypeError
            return super().forward(x)

    assert safe_rope.audit(Model(part(Strict, wide=False)).to(BF16)).verdict == "unknown"
    assert safe_rope.audit(Model(part(Strict, wide=True)).to(BF16)).ok


class Routed(nn.Module):
    """Sends rows to the nearest of its weights: what a rounding moves there is for no count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(-1), HEADS)
        slots = chosen.cumsum(1) * chosen
        return (slots < 200).to(x.dtype) * self.gate(x)


class Channels(nn.Module):
    """Counts its channels, which every dtype holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.arange(DIM, dtype=x.dtype)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).cumsum(1)


@pytest.mark.parametrize("cls", [Routed, Channels, Summed])
def test_the_arithmetic_of_a_low_dtype_is_not_judged(cls: type[nn.Module]) -> None:
    assert safe_rope.audit(Model(cls()).to(BF16)).ok
