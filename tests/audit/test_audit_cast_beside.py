"""Numbers that a forward takes sines of, beside weights, which no name and no order of them tells."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import safe_rope

DIM = 16
device, dim = torch.device("cpu"), DIM // 2
"""As scripts call what they put models on, and what they make of them."""


class Beside(nn.Module):
    """Adds what it makes of positions to what a weight does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.fill()

    def fill(self) -> None:
        raise NotImplementedError

    def phases(self, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        phases = self.phases(torch.arange(x.shape[-2]))
        return self.lin(x) + torch.cat([phases.sin(), phases.cos()], -1).to(x.dtype)


class FactorInATensor(Beside):
    def fill(self) -> None:
        self.register_buffer("factor", torch.tensor(math.log(10000.0) / 7))

    def phases(self, positions: Tensor) -> Tensor:
        return positions[:, None] * torch.exp(-self.factor.float() * torch.arange(DIM // 2))


class ListedInNoOrder(Beside):
    def fill(self) -> None:
        self.register_buffer("omega", torch.tensor([0.917, 0.531, 1.203, 0.117, 0.0391, 0.37, 0.09, 0.7]))

    def phases(self, positions: Tensor) -> Tensor:
        return positions[:, None] * self.omega.float()


class FewListed(ListedInNoOrder):
    def fill(self) -> None:
        self.register_buffer("omega", torch.tensor([0.917, 0.0391]))

    def phases(self, positions: Tensor) -> Tensor:
        return (positions[:, None] * self.omega.float()).repeat(1, DIM // 4)


class ListedBeside(Beside):
    def fill(self) -> None:
        self.register_buffer("omega", torch.tensor([0.917, 0.531, 1.203, 0.117, 0.0391, 0.37, 0.09, 0.7]))


class OnAGlobalDevice(ListedBeside):
    def phases(self, positions: Tensor) -> Tensor:
        return positions[:, None] * torch.as_tensor(self.omega.float(), device=device)


class InAGlobalShape(ListedBeside):
    def phases(self, positions: Tensor) -> Tensor:
        return (positions[:, None] * self.omega.float()).reshape(-1, dim)


class FilledWithOne(ListedBeside):
    def phases(self, positions: Tensor) -> Tensor:
        of = positions[:, None].expand(-1, DIM // 2).float()
        return of * torch.full_like(of, self.omega[1])


class ComplexStates(nn.Module):
    """The kernel of a state space model, from complex numbers that Python has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.register_buffer("A", torch.tensor([complex(-0.5, math.pi * i) for i in range(8)]))

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(x.shape[-2]).float()
        kernel = torch.exp(self.A[:, None] * times).sum(0).real
        return self.lin(x) * kernel[:, None].to(x.dtype)


class FactorNamed(FactorInATensor):
    """What other numbers stand beside it is nobody's concern."""

    def fill(self) -> None:
        super().fill()
        self.register_buffer("weights", torch.tensor([0.1, 0.3, 0.57, 1.1, 2.3, 3.7, 4.1, 5.3]))


class BesideFrequencies(FactorInATensor):
    """The guard keeps the one, and the other is as in the stock model."""

    def fill(self) -> None:
        super().fill()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, DIM, 2).float() / DIM))

    def phases(self, positions: Tensor) -> Tensor:
        return super().phases(positions) + positions[:, None] * self.inv_freq.float()


STYLES = [FactorInATensor, FactorNamed, ListedInNoOrder, FewListed, ComplexStates, BesideFrequencies]
STYLES += [OnAGlobalDevice, InAGlobalShape, FilledWithOne]


def _off(model: nn.Module, like: nn.Module) -> float:
    """How far FP32 arithmetic on the tables of a cast model is off, with right weights."""
    model.lin = like.lin
    x = torch.randn(1, 300, DIM, generator=torch.Generator().manual_seed(0))
    return float((model(x) - like(x)).detach().abs().max())


@pytest.mark.contract
@pytest.mark.parametrize("cls", STYLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_cast_leaves_of_numbers_that_are_turned_is_damaged(
    cls: type[nn.Module], dtype: torch.dtype
) -> None:
    """There and back, it stays lost."""
    model = cls().to(dtype)
    verdicts = [safe_rope.audit(model).verdict, safe_rope.audit(model.float()).verdict]
    off = _off(model, cls())
    assert off > 1e-3
    assert verdicts == ["damaged", "damaged"]


@pytest.mark.contract
@pytest.mark.parametrize("cls", STYLES)
def test_what_no_cast_has_reached_is_none(cls: type[nn.Module]) -> None:
    """As it was built, and in FP64."""
    assert safe_rope.audit(cls()).ok
    assert safe_rope.audit(cls().double()).ok


class ScaledWords(Beside):
    """Multiplies words by a number, and counts as many positions as there are words."""

    def fill(self) -> None:
        self.register_buffer("embed_scale", torch.tensor(math.sqrt(48)), persistent=False)

    def phases(self, positions: Tensor) -> Tensor:
        return positions[:, None] * torch.exp(torch.arange(DIM // 2).float() * -math.log(10000.0) / 8)

    def counts(self, words: Tensor) -> Tensor:
        return torch.arange(words.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        words = self.lin(x) * self.embed_scale
        phases = self.phases(self.counts(words).float())
        return words + torch.cat([phases.sin(), phases.cos()], -1).to(words)


class ScaledWordsBySize(ScaledWords):
    def counts(self, words: Tensor) -> Tensor:
        _, length, _ = words.size()
        return torch.arange(length, device=words.device)


class ScaledWordsByLength(ScaledWords):
    def counts(self, words: Tensor) -> Tensor:
        return torch.ones(len(words[0])).cumsum(-1).type_as(words) - 1


class ScaledWordsInPlace(ScaledWords):
    def forward(self, x: Tensor) -> Tensor:
        words = self.lin(x) * self.embed_scale
        added = torch.zeros_like(words)
        phases = self.phases(torch.arange(x.shape[1]))
        added[..., 0::2] = phases.sin().to(words.dtype)
        added[..., 1::2] = phases.cos().to(words.dtype)
        return words + added


@pytest.mark.contract
@pytest.mark.parametrize("cls", [ScaledWords, ScaledWordsBySize, ScaledWordsByLength, ScaledWordsInPlace])
def test_a_number_beside_what_is_turned_is_no_position(cls: type[nn.Module]) -> None:
    """Its sines are as right after a cast as before, and the number is a weight's business."""
    model = cls().bfloat16()
    x = torch.randn(1, 40, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert model(x).dtype == torch.bfloat16
    assert not safe_rope.audit(model).findings


@pytest.mark.contract
def test_what_the_guard_does_not_keep_is_damaged_in_a_module_that_it_keeps() -> None:
    """The report names that module, and the audit the number."""
    with safe_rope.guard():
        model = BesideFrequencies().bfloat16()
    assert [one.what for one in safe_rope.audit(model).findings if one.severity == "damaged"] == ["factor"]


@pytest.mark.contract
def test_numbers_of_a_checkpoint_are_meant_so() -> None:
    """They are no cast of what the constructor makes."""
    model, other = FactorInATensor(), FactorInATensor()
    other.factor.fill_(0.37)
    model.load_state_dict(other.bfloat16().state_dict())
    assert safe_rope.audit(model).ok


class CountsPi(nn.Module):
    """The cosines of implicit quantiles, of pi times a count, which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.pis = nn.Parameter(math.pi * torch.arange(DIM), requires_grad=False)

    def forward(self, x: Tensor, taus: Tensor) -> Tensor:
        return self.lin(x) * torch.cos(taus * self.pis).to(x.dtype)


@pytest.mark.contract
def test_frozen_frequencies_may_begin_with_zero() -> None:
    """Rounded, they are as wrong as others."""
    assert safe_rope.audit(CountsPi()).ok
    model = CountsPi().bfloat16()
    assert float((model.pis - CountsPi().pis).detach().abs().max()) > 0.05
    assert safe_rope.audit(model).verdict == "damaged"


class SixSlopes(nn.Module):
    """The slopes of six heads by a formula of Python's, under a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, 6)
        self.register_buffer("m", torch.tensor([2.0 ** (-8 * i / 6) for i in range(1, 7)]))

    def forward(self, x: Tensor) -> Tensor:
        distances = torch.arange(x.shape[-2])
        return self.lin(x) - self.m * distances[:, None]


@pytest.mark.contract
def test_slopes_of_few_heads_are_told_by_their_formula() -> None:
    """Beside weights, too."""
    assert safe_rope.audit(SixSlopes()).ok
    assert safe_rope.audit(SixSlopes().bfloat16()).verdict == "damaged"


class Buckets(nn.Module):
    """An index of distances that are clamped, which no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(17, 4)
        distances = torch.arange(8) - torch.arange(8)[:, None]
        self.register_buffer("index", distances.clamp(-8, 8) + 8, persistent=False)

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.bias(self.index).permute(2, 0, 1)


@pytest.mark.contract
@pytest.mark.parametrize("left", [0, 1 << 40, -3])
def test_an_index_that_nobody_has_filled_is_unknown(left: int) -> None:
    """What memory holds is no index, whatever the constructor makes of its counts."""
    state = Buckets().state_dict()
    with torch.device("meta"):
        model = Buckets()
    model.to_empty(device="cpu").load_state_dict(state)
    model.index.fill_(left)
    model.index[0, 0] = 0
    assert safe_rope.audit(Buckets()).ok
    assert safe_rope.audit(model).verdict == "unknown"
