"""Counts in a dtype that rounds them are damage where it shows; what is made of right ones is none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from audited import Model
from torch import Tensor, nn

import safe_rope

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Counts(nn.Module):
    """Makes a bias of distances, counted in FP32, or in the dtype of what it is given."""

    wide = True

    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=FP32 if self.wide else x.dtype)

    def distances(self, x: Tensor) -> Tensor:
        positions = self.positions(x)
        return (positions[:, None] - positions).abs()

    def bias(self, x: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, 5).to(x.dtype if not self.wide else FP32)
        return (-slopes[:, None, None] * self.distances(x)).to(x.dtype)


class Alibi(Counts):
    def forward(self, x: Tensor) -> Any:
        return self.bias(x)


class Logarithm(Counts):
    def forward(self, x: Tensor) -> Any:
        return {"bias": torch.log1p(self.distances(x)).to(x.dtype)}


class Buckets(Counts):
    def forward(self, x: Tensor) -> Any:
        return (16 + torch.log(self.distances(x) / 16) / math.log(600 / 16) * 16).clamp(0, 31).long()


class Window(Counts):
    def forward(self, x: Tensor) -> Any:
        return self.distances(x) < 100


class Normalised(Counts):
    def forward(self, x: Tensor) -> Any:
        bias = self.bias(x)
        return (bias - bias.mean(-1, keepdim=True)) / bias.std(-1, keepdim=True)


class Summed(Counts):
    def forward(self, x: Tensor) -> Any:
        return (self.bias(x) @ x[0]).sum(-1)


class Thresholded(Counts):
    def forward(self, x: Tensor) -> Any:
        return (self.bias(x) > -77.3).to(x.dtype)


class Masked(Counts):
    def forward(self, x: Tensor) -> Any:
        bias = self.bias(x)
        return bias.masked_fill(torch.ones_like(bias).triu(1).bool(), -torch.inf)


class Softmax(Counts):
    def forward(self, x: Tensor) -> Any:
        return torch.exp(self.bias(x) - self.bias(x).logsumexp(-1, keepdim=True))


class Differences(Counts):
    def forward(self, x: Tensor) -> Any:
        return self.bias(x).diff(dim=-1)


class Scaled(Counts):
    def forward(self, x: Tensor) -> Any:
        return self.bias(x) * 0.37 + 1.3


class Added(Counts):
    def forward(self, x: Tensor) -> Any:
        return x @ x.mT + self.bias(x)


class Jittered(Counts):
    def forward(self, x: Tensor) -> Any:
        return nn.functional.dropout(self.bias(x), 0.5, training=self.training)


SHOWN: list[type[Counts]] = [Alibi, Logarithm, Window, Masked, Jittered]
USED: list[type[Counts]] = [
    *(Buckets, Scaled, Normalised, Summed, Thresholded, Softmax, Differences, Added),
]


def low(cls: type[Counts]) -> type[Counts]:
    return type(cls.__name__, (cls,), {"wide": False, "__module__": __name__})


@pytest.mark.parametrize("cls", [*SHOWN, *USED])
def test_what_is_made_of_right_counts_is_not_judged(cls: type[Counts]) -> None:
    assert safe_rope.audit(Model(cls()).to(BF16)).ok


@pytest.mark.parametrize("cls", [*SHOWN, *USED])
def test_rounded_counts_that_show_are_no_longer_right(cls: type[Counts]) -> None:
    assert not safe_rope.audit(Model(low(cls)()).to(BF16)).ok
    assert safe_rope.audit(Model(low(cls)())).ok


def test_counts_are_made_as_far_as_a_dtype_holds_them() -> None:
    assert safe_rope.audit(Model(Logarithm()).to(FP16)).ok
    assert safe_rope.audit(Model(low(Logarithm)()).to(FP16)).damaged


@pytest.mark.parametrize("cls", SHOWN)
def test_rounded_counts_are_damage_where_nothing_else_explains_it(cls: type[Counts]) -> None:
    report = safe_rope.audit(Model(low(cls)()).to(BF16))
    assert [one.what for one in report.damaged] == ["forward"]


def test_counts_beside_weights_are_judged_where_those_make_nothing_of_them() -> None:
    class Distances(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Any:
            counts = torch.arange(x.shape[1], dtype=FP32 if self.wide else x.dtype)
            return torch.log1p((counts[:, None] - counts).abs()).to(x.dtype)

    class Low(Distances):
        wide = False

    assert safe_rope.audit(Model(Distances()).to(BF16)).ok
    assert safe_rope.audit(Model(Low()).to(BF16)).damaged


@pytest.mark.parametrize(("dtype", "heads"), [(BF16, 1), (BF16, 32), (FP16, 1)])
def test_pairs_are_made_as_far_as_memory_holds_them(dtype: torch.dtype, heads: int) -> None:
    asked: list[int] = []

    class Pairs(Counts):
        """A bias for each pair of the places of a map."""

        def forward(self, x: Tensor) -> Any:
            _, _, height, width = x.shape
            asked.append(heads * (height * width) ** 2)
            assert asked[-1] <= 2**28
            positions = torch.arange(height * width, dtype=FP32 if self.wide else x.dtype)
            slopes = torch.ones(heads, 1, 1)
            return (slopes * (positions[:, None] - positions).float()).to(x.dtype)

    assert safe_rope.audit(Model(Pairs()).to(dtype)).ok
    assert safe_rope.audit(Model(low(Pairs)()).to(dtype)).damaged


def test_scores_are_made_as_long_as_their_dtype_needs() -> None:
    class Scores(Counts):
        def forward(self, x: Tensor) -> Any:
            positions = torch.arange(x.shape[-1], dtype=FP32 if self.wide else x.dtype)
            return torch.log1p((positions[:, None] - positions).abs()).to(x.dtype).expand(x.shape)

    for dtype in (BF16, FP16):
        assert safe_rope.audit(Model(Scores()).to(dtype)).ok
        assert safe_rope.audit(Model(low(Scores)()).to(dtype)).damaged
