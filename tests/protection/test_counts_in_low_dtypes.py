"""What a module without weights counts is counted in FP32, whatever the dtype it takes from what it holds.

The truth is the unguarded model in FP32, rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safe_rope
from safe_rope.errors import PrecisionWarning

BF16 = torch.bfloat16
X = torch.zeros(1, 600, 32)


class Rope(nn.Module):
    def frequencies(self, dtype: torch.dtype) -> Tensor:
        return 10000.0 ** (-torch.arange(16).to(dtype) / 16)

    def waves(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        phases = torch.arange(x.shape[1]).to(dtype)[:, None] * self.frequencies(dtype)
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


class ByABuffer(Rope):
    """Counts in the dtype of a buffer that is no table, in a property, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchor", torch.zeros(1), persistent=False)

    @property
    def rates(self) -> Tensor:
        return self.frequencies(self.anchor.dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phases = torch.arange(x.shape[1]).to(self.anchor)[:, None] * self.rates
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


class OfIntegers(ByABuffer):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        phases = torch.arange(ids.shape[1]).to(self.anchor)[:, None] * self.rates
        return phases.cos(), phases.sin()


class WritesToIt(ByABuffer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.anchor += 1
        return super().forward(x)


class ByADtype(Rope):
    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32

    def to(self, dtype: Any) -> ByADtype:
        self.dtype = dtype
        return super().to(dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.waves(x, self.dtype)


class OfAList(Rope):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [10000.0 ** (-i / 16) for i in range(16)]

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        phases = ids[..., None] * torch.tensor(self.rates, dtype=x.dtype)
        return phases.cos(), phases.sin()


class Model(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.weight = part, nn.Linear(2, 2)

    def to(self, dtype: Any) -> Model:
        self.part.to(dtype)
        return super().to(dtype)


@pytest.mark.parametrize("way", ["guard", "protect"])
@pytest.mark.parametrize("cls", [ByABuffer, OfIntegers, WritesToIt, ByADtype, OfAList])
@pytest.mark.contract
def test_counts_in_the_dtype_of_what_is_held_are_exact(cls: type[nn.Module], way: str) -> None:
    ids = torch.arange(600)[None]
    given = (X, ids) if cls is OfAList else (ids,) if cls is OfIntegers else (X,)
    low = [one.to(BF16) if one.is_floating_point() else one for one in given]
    true = cls()(*given)
    with safe_rope.guard():
        model = Model(cls())
    if way == "protect":
        model = Model(cls()).to(BF16)
        safe_rope.protect(model)
    module: Any = model.to(BF16).part
    for _ in range(2):
        cos, sin = module(*low)
        assert torch.equal(cos, true[0].to(BF16))
        assert torch.equal(sin, true[1].to(BF16))
    assert (cls().to(BF16)(*low)[0].float() - true[0]).abs().max() > 0.5
    assert safe_rope.audit(Model(cls()).to(BF16)).damaged
    assert safe_rope.audit(model).ok
    if hasattr(module, "anchor"):
        assert module.anchor.dtype == BF16
        assert module.anchor.item() == 2 * (cls is WritesToIt)


def test_in_a_graph_they_are_as_in_stock_and_told_of() -> None:
    with safe_rope.guard():
        module = ByABuffer()
    module.to(BF16)
    with pytest.warns(PrecisionWarning, match="anchor"):
        cos, _ = torch.compile(module, backend="eager", fullgraph=True)(X.to(BF16))
    assert torch.equal(cos, ByABuffer().to(BF16)(X.to(BF16))[0])


# ---- without sines -------------------------------------------------------------------------------------


def distances(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1], dtype=x.dtype)
    return (positions[:, None] - positions).abs()


class Alibi(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        slopes = (2.0 ** -torch.arange(1, 5)).to(x.dtype)
        return -slopes[:, None, None] * distances(x)


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"bias": torch.log1p(distances(x)), "length": x.shape[1]}


class Buckets(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (16 + torch.log(distances(x) / 16) / math.log(600 / 16) * 16).clamp(0, 31).long()


class Window(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return distances(x) < 100


class OfAMask(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        return torch.log1p(mask.cumsum(1) - 1)


class Bells(nn.Module):
    """Widths in a buffer that is called as noise is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", 2.0 ** torch.arange(1, 5) * 1.3, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(x.shape[1], dtype=torch.float32)
        return -(counts[:, None] - counts).pow(2)[::23] / (2 * self.spread.float()[:, None, None] ** 2)


def bias(result: Any) -> Tensor:
    made: Tensor = result["bias"] if isinstance(result, dict) else result
    return made


@pytest.mark.parametrize("way", ["guard", "protect"])
@pytest.mark.parametrize("cls", [Alibi, Logarithm, Buckets, Window, OfAMask, Bells])
@pytest.mark.contract
def test_counts_that_no_sines_are_taken_of_are_rounded_once(cls: type[nn.Module], way: str) -> None:
    x = torch.ones(1, 600) if cls is OfAMask else X
    true, stock = bias(cls()(x)), bias(cls().to(BF16)(x.to(BF16)))
    with safe_rope.guard():
        model = Model(cls())
    if way == "protect":
        model = Model(cls()).to(BF16)
        safe_rope.protect(model)
    part = model.to(BF16).part
    for _ in range(2):
        made = bias(part(x.to(BF16)))
        assert type(made) is Tensor
        assert made.dtype == stock.dtype
        assert torch.equal(made, true.to(stock.dtype))
    assert not torch.equal(stock, true.to(stock.dtype))
    assert safe_rope.audit(model).ok
    assert safe_rope.audit(Model(cls()).to(BF16)).damaged or cls in (Buckets, OfAMask)


def test_positions_that_are_handed_out_are_exact() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.arange(x.shape[1]).to(x.dtype)

    with safe_rope.guard():
        module = Positions()
    made = module(X.to(BF16))
    assert made.dtype == BF16
    assert torch.equal(made.float().sin(), torch.arange(600.0).sin())


class Scores(nn.Module):
    counts_in: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(x.shape[1]).to(self.counts_in or x.dtype)
        return x @ x.mT - (0.01 * (counts[:, None] - counts).abs()).to(x.dtype)


class InFP32(Scores):
    counts_in = torch.float32


class RunningSum(nn.Module):
    """Sums activations, and counts nothing beyond 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


@pytest.mark.parametrize("cls", [Scores, InFP32, RunningSum])
@pytest.mark.contract
def test_activations_stay_as_in_stock(cls: type[nn.Module], recwarn: pytest.WarningsRecorder) -> None:
    given = torch.randn(1, 600, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    x, other = given.clone().requires_grad_(), given.clone().requires_grad_()
    with safe_rope.guard() as session:
        model = Model(cls())
    made, stock = model.part(x), cls()(other)
    assert torch.equal(made, stock)
    made.float().sum().backward()
    stock.float().sum().backward()
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    assert not session.report.unprotected
    told = [one for one in recwarn if issubclass(one.category, PrecisionWarning)]
    assert ["counts in torch.bfloat16" in str(one.message) for one in told] == [True] * (cls is Scores)
    assert safe_rope.audit(model.to(BF16)).ok == (cls is not Scores)


class Mask(nn.Module):
    """Ends in the lowest number of its dtype, which FP32 has not."""

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(x.shape[1])
        allowed = counts <= counts[:, None]
        return torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, torch.finfo(x.dtype).min)


class Codes(nn.Module):
    """Holds codes, which begin evenly and are trained past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.linspace(-1, 1, 16)[:, None].repeat(1, 32))

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x[0, :, None] - self.codebook).abs().sum(-1).argmin(-1)
        chosen = (nearest == torch.arange(16)[:, None]).to(x.dtype)
        self.codebook.lerp_(chosen @ x[0] / (chosen.sum(1, keepdim=True) + 1), 0.1)
        return self.codebook[nearest]


@pytest.mark.parametrize("cls", [Mask, Codes])
def test_masks_and_states_are_as_in_stock(cls: type[nn.Module]) -> None:
    x = torch.randn(1, 600, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    with safe_rope.guard() as session:
        guarded = cls()
    stock, guarded = cls().to(BF16), guarded.to(BF16)
    for _ in range(3):
        assert torch.equal(guarded(x), stock(x))
    assert not session.report.protected
    assert safe_rope.audit(Model(cls())).ok


class OfATrainedBase(nn.Module):
    """Takes powers of a trained base, and counts in their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("exponents", -torch.arange(16).float() / 16 * math.log(1e4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.exp(self.exponents * self.scale.float())
        return torch.outer(torch.arange(x.shape[1]).type_as(rates), rates).cos().to(x.dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.contract
def test_powers_that_meet_counts_in_their_dtype_are_named(dtype: torch.dtype) -> None:
    with safe_rope.guard():
        model = Model(OfATrainedBase())
    model.to(dtype)
    with torch.no_grad(), pytest.warns(PrecisionWarning, match=f"counted in {dtype}.*phases are rounded"):
        made = model.part(X.to(dtype))
    with torch.no_grad():
        assert (made.float() - OfATrainedBase()(X)).abs().max() > 0.05
    assert "phases" in str(safe_rope.audit(model))
