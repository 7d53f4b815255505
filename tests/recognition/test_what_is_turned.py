"""Frequencies are what sines or cosines are taken of a product with; what is not turned so is no position."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import safe_rope
from safe_rope._base.turned import turned_at_random, turned_when_called, turned_when_multiplied

BF16 = torch.bfloat16
TIMES = torch.arange(0, 1024.0, 4)  # BF16 has each of them


class TimeEncoding(nn.Module):
    """Cosines alone, as torch_geometric's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x.view(-1, 1) @ self.weight.view(1, -1))


class ShiftedSine(TimeEncoding):
    """Sines alone, of a phase and of the phase a quarter of a turn on, as nerfstudio's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = x.view(-1, 1) * self.weight
        return torch.sin(torch.cat((phase, phase + math.pi / 2), -1))


class Hyperbolic(TimeEncoding):
    """Hyperbolic sines of shrinking distances, as a rotation in Lorentz's sense takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.logspace(-5, -3, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sinh(x.view(-1, 1) * self.alpha)


def test_a_hyperbolic_sine_turns_too() -> None:
    assert "alpha" in turned_when_multiplied(Hyperbolic)
    with safe_rope.guard():
        module = Hyperbolic()
    given, true = module.to(BF16)(TIMES.to(BF16)).float(), Hyperbolic()(TIMES)
    assert ((given - true).abs() <= 2**-8 * true.abs()).all()
    assert ((Hyperbolic().to(BF16)(TIMES.to(BF16)).float() - true).abs() > 2**-8 * true.abs()).any()


@pytest.mark.parametrize("cls", [TimeEncoding, ShiftedSine])
@pytest.mark.parametrize("way", ["guard", "protect"])
@pytest.mark.filterwarnings("ignore::safe_rope.errors.PrecisionWarning")  # positions in 16 bits
@pytest.mark.contract
def test_a_phase_is_exact_where_only_one_of_sine_and_cosine_is_taken(cls: type[nn.Module], way: str) -> None:
    true = cls()(TIMES)
    if way == "guard":
        with safe_rope.guard():
            module = cls()
    else:
        module = cls()
        safe_rope.protect(module)
    given = module.to(BF16)(TIMES.to(BF16))
    assert given.dtype == BF16
    assert (given.float() - true).abs().max() <= 2**-8
    assert (cls().to(BF16)(TIMES.to(BF16)).float() - true).abs().max() > 0.5


class ListedRates(nn.Module):
    """Turns per beat, as a list of what bars are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beat", torch.tensor([2 * math.pi / n for n in (1, 3, 4, 6, 7, 9, 24, 384)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = x[:, None] * self.beat
        return torch.stack((phase.sin(), phase.cos()), -1)


class InBlocks(nn.Module):
    """A block of frequencies for each coordinate, which neither rises nor falls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("K", torch.kron(torch.eye(3), torch.tensor([[1.0, 0.1, 0.01, 0.001]])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.stack((x, x / 4, 1024 - x), -1) @ self.K.to(x.dtype)
        return torch.cat((phase.sin(), phase.cos()), -1)


@pytest.mark.parametrize("cls", [ListedRates, InBlocks])
@pytest.mark.parametrize("way", ["guard", "protect"])
@pytest.mark.parametrize("low", [torch.float16, BF16])
@pytest.mark.contract
def test_what_the_audit_calls_damaged_is_kept(cls: type[nn.Module], way: str, low: torch.dtype) -> None:
    true, stock = cls()(TIMES), nn.Sequential(cls()).to(low)
    assert (stock(TIMES).float() - true).abs().max() > 0.02
    assert safe_rope.audit(stock).verdict == "damaged"
    if way == "guard":
        with safe_rope.guard():
            model = nn.Sequential(cls())
    else:
        safe_rope.protect(model := nn.Sequential(cls()))
    model.to(low)
    assert (model(TIMES).float() - true).abs().max() <= 2**-8
    assert safe_rope.audit(model).verdict == "ok"


class RandomFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("B", torch.randn(3, 10) * 8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = 2 * math.pi * x @ self.B
        return torch.cat((phase.sin(), phase.cos()), -1)


class OneSine(RandomFeatures):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("B", torch.normal(mean=0.0, std=8.0, size=(3, 10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = 2 * math.pi * x @ self.B
        return torch.sin(torch.cat((phase, phase + math.pi / 2), -1))


class FrozenFeatures(RandomFeatures):
    """As in score_sde and in diffusers' GaussianFourierProjection."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.B = nn.Parameter(torch.randn(3, 10) * 8.0, requires_grad=False)


class FrozenAfterwards(RandomFeatures):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.B = nn.Parameter(torch.empty(3, 10))
        self.reset_parameters()
        self.B.requires_grad_(False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.B, std=8.0)


class InALoop(RandomFeatures):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phases = [F.linear(2 * math.pi * x, self.B.t())]
        return torch.cat([turn(phase) for turn in (torch.sin, torch.cos) for phase in phases], -1)


class ByAMethod(RandomFeatures):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.waves(self.phase(x))

    def phase(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * math.pi * x @ self.B.to(x.dtype)

    def waves(self, phase: torch.Tensor) -> torch.Tensor:
        return _both(phase)


def _both(phase: torch.Tensor) -> torch.Tensor:
    return torch.cat((phase.sin(), phase.cos()), -1)


class ByPhasors(RandomFeatures):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = 2 * math.pi * torch.einsum("nd,df->nf", x, self.B)
        return torch.view_as_real(torch.polar(torch.ones_like(phase), phase)).transpose(-1, -2).flatten(-2)


class Derived(RandomFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.more = 1


RANDOM: list[type[nn.Module]] = [
    *(RandomFeatures, OneSine, FrozenFeatures, FrozenAfterwards, InALoop, ByAMethod, ByPhasors, Derived)
]


@pytest.mark.parametrize("cls", RANDOM)
@pytest.mark.contract
def test_random_frequencies_are_named_whatever_they_are_called(cls: type[nn.Module]) -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(cls())
    for report in (session.report, safe_rope.protect(model)):
        assert ["B is nothing that its" in str(entry) for entry in report.left] == [True]
    x = torch.rand(9, 3)
    true = model(x)
    assert safe_rope.audit(model).ok
    damaged = safe_rope.audit(model.to(BF16).float())
    assert (model(x) - true).abs().max() > 0.05
    assert damaged.verdict == "unknown"
    assert [finding.what for finding in damaged.findings] == ["B"]


def test_random_whole_numbers_lose_nothing() -> None:
    class Signs(RandomFeatures):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.register_buffer("B", torch.randint(-9, 9, (3, 10)).float())

    assert safe_rope.audit(Signs()).ok
    assert safe_rope.audit(Signs().to(BF16)).ok


# ---- what is no position -------------------------------------------------------------------------------


class Trained(RandomFeatures):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.B = nn.Parameter(torch.randn(3, 10))


class Snake(nn.Module):
    """The activation of vocoders."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.randn(3).abs())
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.alpha * x).pow(2) / (self.alpha + 1e-9) + self.shift


class FilteredSnake(nn.Module):
    """With the filter of BigVGAN beside the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", torch.kaiser_window(12, periodic=False)[None, None])
        self.register_buffer("gain", torch.tensor([1.0, 1.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.conv1d(x[:, None], self.filter, padding=6)[:, 0, : x.shape[1]]
        return x + torch.sin(self.gain * y).pow(2)


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w0 = 30.0
        self.lin = nn.Linear(3, 10)
        self.weight = nn.Parameter(torch.empty(10, 10).uniform_(-0.1, 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.w0 * F.linear(torch.sin(self.w0 * self.lin(x)), self.weight))


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * torch.erf(x * self.slope)


class Noisy(nn.Module):
    """Noise and a mask from a generator, beside a sine of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("dither", torch.randn(3) * 0.1)
        self.register_buffer("drop", torch.bernoulli(torch.full((3,), 0.5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(x).unsqueeze(-1) * torch.cos(x).unsqueeze(-1)
        return waves.squeeze(-1) * self.drop + self.dither


class Codebook(nn.Module):
    """A random codebook and a sinusoidal time in one class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(16, 3))
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = x[:, :1].sin() + x[:, :1].cos()
        nearest = torch.cdist(x.float(), self.embed.float()).argmin(-1)
        return self.lin(F.embedding(nearest, self.embed)) + time


class Performer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection_matrix", torch.linalg.qr(torch.randn(8, 8))[0][:, :3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.projection_matrix.t() - x.square().sum(-1, keepdim=True) / 2).exp()


class Spectrogram(nn.Module):
    """A window, a filterbank and a cosine of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.register_buffer("mel_basis", torch.rand(4, 9).sort(0).values)
        self.mel = torch.rand(9).numpy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signal = x.flatten().repeat(8).float()
        power = torch.stft(signal, 16, 4, window=self.window.float(), return_complex=True).abs()
        return torch.cos(self.mel_basis.float() @ power).to(x.dtype)


class States(nn.Module):
    """A state that is drawn to begin with, and statistics of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h0", torch.randn(1, 3))
        # Without a weight: DeepSpeed 0.14 leaves batch norms patched once a zero.Init has ended.
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x) + self.h0) * x.cos()


NONE: list[type[nn.Module]] = [
    *(Trained, Snake, FilteredSnake, Siren, Gelu, Noisy, Codebook, Performer, Spectrogram),
    States,
]


@pytest.mark.parametrize("cls", NONE)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.contract
def test_what_is_no_position_is_neither_named_nor_changed(
    cls: type[nn.Module], trained: bool, recwarn: pytest.WarningsRecorder
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(cls()).eval().requires_grad_(trained)

    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    stock = build()
    with safe_rope.guard() as session:
        guarded = build()
    protected = build()
    for report in (session.report, safe_rope.protect(protected)):
        assert (report.protected, report.unprotected, report.left) == ([], [], [])
    assert type(guarded[0]) is type(protected[0]) is cls
    for dtype in (torch.float32, BF16):
        expected = stock.to(dtype)(x.to(dtype))
        for model in (guarded, protected):
            assert torch.equal(model.to(dtype)(x.to(dtype)), expected)
            assert not safe_rope.audit(model).findings
        with torch.autocast("cpu", BF16):
            given = [model(x.to(dtype)) for model in (stock, guarded, protected)]
        assert all(torch.equal(one, given[0]) for one in given)
    assert not [w for w in recwarn if "PrecisionWarning" in w.category.__name__]


def _names(cls: Any) -> set[str]:
    return set(turned_at_random(cls))


def test_only_what_reaches_a_sine_is_turned() -> None:
    assert _names(RandomFeatures) == {"B"}
    assert _names(Noisy) == set()
    assert _names(TimeEncoding) == set(), "its constructor draws nothing"


class FrozenLayer(nn.Module):
    """Cosines of what a frozen layer makes of times that it counts itself (random Fourier features)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(1, 32)
        self.proj.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, x.shape[1])[:, None]
        return torch.cos(self.proj(times))


class FrozenLayerOfRectified(FrozenLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.relu(x)).cos()


@pytest.mark.parametrize("cls", [FrozenLayer, FrozenLayerOfRectified])
def test_what_a_layer_is_given_may_come_from_a_function_of_torch(cls: type[nn.Module]) -> None:
    assert turned_when_called(cls) == {"proj"}


@pytest.mark.filterwarnings("ignore::safe_rope.errors.PrecisionWarning")
def test_a_frozen_layer_whose_times_are_counted_is_named_and_unknown() -> None:
    with safe_rope.guard() as session:
        module = FrozenLayer()
    said = {entry.reason.split()[0] for entry in session.report.left}
    assert {"proj.weight", "proj.bias"} <= said, session.report
    report = safe_rope.audit(FrozenLayer().half().float())
    assert report.verdict == "unknown"
    assert {finding.what for finding in report.findings} == {"proj.weight", "proj.bias"}
    del module


class ScalesOfCoordinates(nn.Module):
    """Scales of coordinates between -1 and 1, as vit-pytorch has them, by a name that says nothing."""

    def __init__(self, count: int) -> None:  # which it does not keep
        super().__init__()
        self.register_buffer("scales", torch.linspace(1.0, 5.0, count))

    def forward(self, coords: torch.Tensor) -> torch.Tensor:
        theta = (coords[..., None] * self.scales * math.pi).flatten(-2)
        return torch.cat([wave(theta) for wave in (torch.sin, torch.cos)], -1)


class GainBeforeALayer(nn.Module):
    """Multiplies by a buffer that rises, and takes no sines of it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("gain", torch.linspace(1.0, 5.0, count))
        self.shift = nn.Parameter(torch.ones(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + torch.sin(x + self.shift) + torch.cos(x)


@pytest.mark.filterwarnings("ignore::safe_rope.errors.PrecisionWarning")
@pytest.mark.contract
def test_what_is_turned_is_named_where_no_constructor_gives_it_again() -> None:
    coords = torch.linspace(-1, 1, 30).view(10, 3)
    true = ScalesOfCoordinates(7)(coords)
    for count in (7, 10):
        module = nn.Sequential(ScalesOfCoordinates(count)).half().float()
        assert not torch.equal(module[0].scales, ScalesOfCoordinates(count).scales)
        assert [f.what for f in safe_rope.audit(module).findings] == ["scales"]
        assert safe_rope.audit(module).verdict == "unknown"
        assert "scales: its constructor cannot be run again" in str(safe_rope.protect(module).unprotected)
    low = nn.Sequential(ScalesOfCoordinates(7)).to(BF16)
    assert safe_rope.audit(low).verdict == "unknown"
    with torch.device("meta"):
        empty = nn.Sequential(ScalesOfCoordinates(7))
    empty = empty.to_empty(device="cpu")
    empty[0].scales.fill_(torch.nan)
    assert safe_rope.audit(empty).verdict == "damaged"
    kept = ScalesOfCoordinates(7)
    safe_rope.protect(kept)
    assert torch.equal(kept.to(BF16)(coords), true)


@pytest.mark.contract
def test_what_is_multiplied_and_not_turned_is_not_named() -> None:
    module = nn.Sequential(GainBeforeALayer(10)).to(BF16)
    assert safe_rope.audit(module).ok
    assert not safe_rope.protect(module).unprotected


class DoubledInAList(nn.Module):
    """Wavelengths that stand twice each in a list, beside weights, as in Transformer Hawkes processes."""

    def __init__(self, buffered: bool) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        vec = torch.tensor([math.pow(10000.0, 2.0 * (i // 2) / 16) for i in range(16)])
        if buffered:
            self.register_buffer("position_vec", vec, persistent=False)
        else:
            self.position_vec = vec

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        phase = times.unsqueeze(-1) / self.position_vec
        encoded = torch.stack((phase[..., ::2].sin(), phase[..., 1::2].cos()), -1).flatten(-2)
        return self.project(x) * 0 + encoded


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.contract
def test_frequencies_that_stand_twice_in_a_list_are_exact_beside_weights(buffered: bool) -> None:
    x, times = torch.randn(1, 400, 16), torch.arange(400)[None]
    true = DoubledInAList(buffered)(x, times)

    def made() -> nn.Module:
        torch.set_default_dtype(BF16)
        try:
            return DoubledInAList(buffered).to(BF16)
        finally:
            torch.set_default_dtype(torch.float32)

    with safe_rope.guard() as session:
        module = made()
    assert not session.report.unprotected
    assert (module(x.to(BF16), times).float() - true).abs().max() <= 2**-8
    assert (made()(x.to(BF16), times).float() - true).abs().max() > 0.5


class KeepsAProduct(TimeEncoding):
    """What a property makes once stands in the object by its name."""

    @functools.cached_property
    def speeds(self) -> torch.Tensor:
        return torch.rand(32).mul(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.speeds.mul(x.view(-1, 1)).cos()


def test_what_a_property_has_made_is_turned_by_a_method_of_it() -> None:
    assert "speeds" in turned_when_multiplied(KeepsAProduct)


class Exponential(nn.Module):
    """Rotations are exponentials of matrices, [row, row] with the speeds of pairs beside the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        speeds = 100.0 ** -(torch.arange(4).float() / 4)
        blocks = [torch.tensor([[0.0, -one], [one, 0.0]]) for one in speeds.tolist()]
        self.register_buffer("skew", torch.block_diag(*blocks), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.arange(x.shape[1])[:, None, None].float()
        return torch.linalg.matrix_exp(times * self.skew.float()).to(x.dtype)


@pytest.mark.parametrize("way", ["guard", "protect"])
@pytest.mark.contract
def test_what_exponentials_of_matrices_are_taken_of_is_exact(way: str) -> None:
    assert turned_when_multiplied(Exponential) == {"skew"}
    x = torch.zeros(1, 600, 8)
    true = Exponential()(x)
    with safe_rope.guard():
        model = nn.Sequential(nn.Linear(2, 2), Exponential())
    if way == "protect":
        model = nn.Sequential(nn.Linear(2, 2), Exponential()).to(BF16)
        assert safe_rope.audit(model).damaged
        safe_rope.protect(model)
    made = model.to(BF16)[1](x.to(BF16))
    assert made.dtype == BF16
    assert (made.float() - true).abs().max() <= 2**-8
    assert (Exponential().to(BF16)(x.to(BF16)).float() - true).abs().max() > 0.04
    assert safe_rope.audit(model).ok
