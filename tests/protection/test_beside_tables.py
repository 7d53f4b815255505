"""Numbers and weights that positions are made of beside tables: amplitudes, bases, frozen weights, counts.

The truth is the unguarded model in FP32.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import pytest
import torch
from support.default_dtype import default_dtype
from torch import Tensor, nn

import safe_rope
from safe_rope.errors import PrecisionWarning

BF16, FP16 = torch.bfloat16, torch.float16
X, POSITIONS = torch.zeros(1, 600, 32), torch.arange(600)[None]


def frequencies() -> Tensor:
    return 10000.0 ** (-torch.arange(0, 32, 2).float() / 32)


class Amplified(nn.Module):
    """YaRN's: an amplitude in a buffer beside the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_buffer("prefactor", torch.tensor(0.1 * math.log(8) + 1), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phases = position_ids[..., None].float() * self.inv_freq
        cos, sin = (phases.cos() * self.prefactor, phases.sin() * self.prefactor)
        return cos.to(x.dtype), sin.to(x.dtype)


class Turned(nn.Module):
    """The same in a module with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_buffer("prefactor", torch.tensor(0.1 * math.log(8) + 1), persistent=False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        phases = position_ids[..., None].float() * self.inv_freq.float()
        cos, sin = phases.cos() * self.prefactor, phases.sin() * self.prefactor
        first, second = self.query(x + 1).chunk(2, -1)
        return first * cos - second * sin, first * sin + second * cos


def built(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"part": cls(), "weight": nn.Linear(2, 2)})


def in_bf16(cls: type[nn.Module], way: str) -> Any:
    """Return a model that a guard has seen before its cast, or that is protected after it."""
    with safe_rope.guard() if way == "guard" else contextlib.nullcontext():
        model = built(cls)
    model.to(BF16)
    if way == "protect":
        safe_rope.protect(model)
    return model


@pytest.mark.parametrize("way", ["guard", "protect"])
def test_an_amplitude_beside_frequencies_is_not_rounded(way: str) -> None:
    true = Amplified()(X, POSITIONS)
    model = in_bf16(Amplified, way)
    for made, exact in zip(model["part"](X.to(BF16), POSITIONS), true, strict=True):
        assert torch.equal(made, exact.to(BF16))
    assert safe_rope.audit(model).ok


@pytest.mark.parametrize("cls", [Amplified, Turned])
def test_an_amplitude_beside_frequencies_comes_back_from_meta(cls: type[nn.Module]) -> None:
    stock: Any = built(cls)
    with safe_rope.guard(), torch.device("meta"):
        model: Any = built(cls)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.numel() == 1:
                buffer.fill_(torch.nan)
        model.load_state_dict(stock.state_dict())
    for made, exact in zip(model["part"](X, POSITIONS), stock["part"](X, POSITIONS), strict=True):
        assert (made - exact).abs().max() < 1e-5
    assert safe_rope.audit(model).ok


class Masked(nn.Module):
    """Slopes beside a mask, a gain for each head and a window, in no file."""

    def __init__(self, heads: int = 8, length: int = 64) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)
        self.register_buffer("gain", torch.full((heads, 1, 1), 0.5), persistent=False)
        self.register_buffer("window", torch.hann_window(length), persistent=False)

    def forward(self, length: int) -> Tensor:
        at = torch.arange(length)
        bias = self.slopes[:, None, None] * (at - at[:, None]).to(self.slopes.dtype)
        return bias * self.gain + self.mask[:length, :length] + self.window[:length]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_stands_beside_slopes_and_is_in_no_file_comes_back_from_meta(dtype: torch.dtype) -> None:
    with safe_rope.guard(), torch.device("meta"):
        model: Any = built(Masked)
    model.to_empty(device="cpu").to(dtype)
    made, stock = model["part"](40), Masked().to(dtype)(40)
    assert made.dtype == stock.dtype
    assert torch.equal(made.isinf(), stock.isinf())
    finite = stock.isfinite()
    assert torch.allclose(made[finite].float(), Masked()(40)[finite], rtol=2 * torch.finfo(dtype).eps)
    assert safe_rope.audit(model).ok


class Gained(nn.Module):
    """Frequencies beside gains that its parent sets."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, dim, 2).float() / dim), persistent=False)
        self.register_buffer("gains", torch.zeros(dim // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * (5 * self.inv_freq.float()).sin().to(x.dtype) + self.gains


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gained() for _ in range(2))
        for layer in self.layers:
            layer.gains.fill_(0.5)


def test_what_a_parent_sets_beside_frequencies_on_meta_has_the_dtype_that_it_was_made_in() -> None:
    with safe_rope.guard(), default_dtype(BF16), torch.device("meta"):
        model = Gains()
    model.to_empty(device="cpu")
    for layer in model.layers:
        assert layer(torch.ones(8, dtype=BF16)).dtype == BF16


class Shifted(nn.Module):
    """Positions less a number, in a module with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_buffer("shift", torch.tensor(100.3), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        phases = (position_ids.float() - self.shift.float())[..., None] * self.inv_freq.float()
        cos, sin = phases.cos().to(x.dtype), phases.sin().to(x.dtype)
        first, second = self.query(x + 1).chunk(2, -1)
        return first * cos - second * sin, first * sin + second * cos


@pytest.mark.parametrize("way", ["guard", "protect"])
def test_a_number_that_positions_are_shifted_by_beside_weights_is_not_rounded(way: str) -> None:
    model = in_bf16(Shifted, way)
    part = model["part"]
    assert float(part.shift) == float(torch.tensor(100.3))
    stock = Shifted()
    stock.load_state_dict(part.state_dict())
    for made, true in zip(part(X.to(BF16), POSITIONS), stock(X, POSITIONS), strict=True):
        assert made.dtype == BF16
        assert float((made - true).abs().max()) < 0.02
    assert safe_rope.audit(model).ok


@pytest.mark.parametrize("way", ["guard", "protect"])
def test_another_number_that_somebody_shifts_positions_by_stays(way: str) -> None:
    with safe_rope.guard() if way == "guard" else contextlib.nullcontext():
        model: Any = built(Shifted)
    model["part"].shift.fill_(50.7)
    if way == "protect":
        safe_rope.protect(model)
    model.to(BF16)
    assert float(model["part"].shift) == float(torch.tensor(50.7))


class Anchored(nn.Module):
    """Frequencies beside an anchor of positions, an order of channels and a causal mask, in no file."""

    def __init__(self, length: int = 64) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_buffer("anchor", torch.tensor([2**26]), persistent=False)
        self.register_buffer("perm", torch.tensor([*range(0, 16, 2), *range(1, 16, 2)]), persistent=False)
        self.register_buffer("causal", torch.ones(length, length, dtype=torch.bool).tril(), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        phases = (positions - self.anchor)[:, None].float() * self.inv_freq[self.perm].float()
        return torch.where(self.causal[: len(positions), :16], phases.cos(), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_integers_and_truths_beside_frequencies_and_in_no_file_come_back_from_meta(
    dtype: torch.dtype,
) -> None:
    positions = torch.arange(2**26, 2**26 + 40)
    with safe_rope.guard(), torch.device("meta"):
        model: Any = built(Anchored)
    model.to_empty(device="cpu").to(dtype)
    part = model["part"]
    assert part.anchor.dtype == part.perm.dtype == torch.int64
    assert part.causal.dtype == torch.bool
    assert torch.equal(part(positions), Anchored()(positions))
    assert safe_rope.audit(model).ok


def test_an_amplitude_that_is_no_number_is_damage_and_named() -> None:
    model: Any = built(Turned)
    model["part"].prefactor.fill_(torch.nan)
    assert "prefactor" in [one.what for one in safe_rope.audit(model).damaged]
    with pytest.warns(PrecisionWarning, match="prefactor: nothing has filled it"):
        safe_rope.protect(model)


class Bessel(nn.Module):
    """MACE's: sines of distances, and numbers that the checkpoint holds."""

    def __init__(self, r_max: float) -> None:
        super().__init__()
        self.register_buffer("bessel_weights", math.pi / r_max * torch.linspace(1.0, 8.0, 8))
        self.register_buffer("prefactor", torch.tensor(math.sqrt(2.0 / r_max)))

    def forward(self, x: Tensor) -> Tensor:
        return self.prefactor * ((self.bessel_weights * x[:, None]).sin() / x[:, None])


class SavedAndTurned(Turned):
    """An amplitude and a counter that the checkpoint holds, in a module with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prefactor", self.prefactor)
        self.register_buffer("steps", torch.tensor(3.0))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        self.steps += 1
        return super().forward(x, position_ids)


def emptied(model: Any) -> Any:
    """Give a model on meta memory that holds no numbers."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
    return model


def test_an_amplitude_of_a_checkpoint_is_kept_as_its_frequencies_are() -> None:
    distances = torch.arange(1, 65) / 11.0
    true = Bessel(6.0)(distances)
    with safe_rope.guard():
        cast = Bessel(6.0).half().float()
        with torch.device("meta"):
            lost = Bessel(6.0)
    for model in (cast, emptied(lost)):
        assert torch.equal(model(distances), true)
        assert safe_rope.audit(model).ok
    meant = {name: value * 2 for name, value in Bessel(6.0).state_dict().items()}
    cast.load_state_dict(meant)
    stock = Bessel(6.0)
    stock.load_state_dict(meant)
    assert torch.equal(cast(distances), stock(distances))
    assert [value.dtype for value in cast.bfloat16().state_dict().values()] == [BF16, BF16]


def test_an_amplitude_of_a_checkpoint_comes_back_beside_weights_and_a_counter_does_not() -> None:
    with safe_rope.guard(), torch.device("meta"):
        model: Any = built(SavedAndTurned)
    stock, part = built(SavedAndTurned), emptied(model)["part"]
    assert torch.equal(part.prefactor, stock["part"].prefactor)
    assert part.steps.isnan()
    state = stock.state_dict()
    state["part.prefactor"] *= 3
    stock.load_state_dict(state)
    model.load_state_dict(state)
    for made, exact in zip(part(X, POSITIONS), stock["part"](X, POSITIONS), strict=True):
        assert (made - exact).abs().max() < 1e-5
    assert part.steps == 4


class OfABase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("theta", torch.tensor(500000.0))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = 1.0 / self.theta.float() ** (torch.arange(0, 32, 2).float() / 32)
        phases = position_ids[..., None].float() * inv_freq
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


def test_a_rounded_base_is_told_without_a_phase_that_nobody_has_measured() -> None:
    report = safe_rope.audit(built(OfABase).to(BF16))
    errors = {one.what: one.phase_error_rad for one in report.damaged}
    assert errors["theta"] is None
    assert 0.01 < (errors["forward"] or 0.0) < 0.2


# ---- frozen weights of layers --------------------------------------------------------------------------


class Times(nn.Module):
    """TGN's: cosines of what a frozen layer makes of times."""

    is_frozen, turns = True, True

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(1, 100)
        self.w.weight = nn.Parameter((1 / 10 ** torch.linspace(0, 9, 100)).reshape(100, 1))
        self.w.bias = nn.Parameter(torch.zeros(100))
        self.w.requires_grad_(not self.is_frozen)

    def forward(self, t: Tensor) -> Tensor:
        turned = self.w(t[..., None])
        return turned.cos() if self.turns else turned


class Trained(Times):
    is_frozen = False


class NotTurned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(1, 100)
        self.w.weight = nn.Parameter(torch.linspace(0.1, 9, 100).reshape(100, 1), requires_grad=False)

    def forward(self, t: Tensor) -> Tensor:
        return self.w(t[..., None])


def test_frequencies_in_a_frozen_layer_are_named() -> None:
    with safe_rope.guard() as session:
        model = built(Times)
    assert ["w.weight" in str(entry) for entry in session.report.left] == [True]
    assert safe_rope.audit(model).ok
    model.to(BF16)
    assert [one.what for one in safe_rope.audit(model).damaged] == ["w.weight"]
    with pytest.warns(PrecisionWarning, match=r"w\.weight"):
        safe_rope.protect(model)
    assert safe_rope.audit(model.float()).verdict == "unknown"


@pytest.mark.parametrize("cls", [Trained, NotTurned])
def test_weights_of_other_layers_are_not_named(cls: type[nn.Module]) -> None:
    with safe_rope.guard() as session:
        model = built(cls)
    assert not session.report.left
    assert not session.report.unprotected
    assert safe_rope.audit(model.to(BF16)).ok


# ---- frozen sinusoids ----------------------------------------------------------------------------------


def sinusoids(dtype: torch.dtype, rows: int = 600) -> Tensor:
    rates = torch.exp(-math.log(10000) * torch.arange(0, 32, 2).to(dtype) / 32)
    phases = torch.arange(rows).to(dtype)[:, None] * rates
    return torch.cat((phases.sin(), phases.cos()), -1)


class Rows(nn.Module):
    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Embedding.from_pretrained(rows, freeze=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids)


class OwnRows(Rows):
    def __init__(self) -> None:
        super().__init__(sinusoids(torch.get_default_dtype()))


@pytest.fixture
def default_bf16() -> Any:
    torch.set_default_dtype(BF16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_bf16")
def test_frozen_sinusoids_of_a_low_default_dtype_are_rounded_once() -> None:
    stock = OwnRows()
    with safe_rope.guard() as session:
        model = built(OwnRows)
    rows: Any = model["part"].rows.weight  # type: ignore[index]
    assert torch.equal(rows, sinusoids(torch.float32).to(BF16))
    assert not rows.requires_grad
    assert (stock.rows.weight.float() - sinusoids(torch.float32)).abs().max() > 1
    assert ["rows.weight" in str(entry) for entry in session.report.left] == [True]
    assert safe_rope.audit(model).ok
    assert safe_rope.audit(nn.Sequential(stock)).damaged


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_frozen_sinusoids_of_rounded_phases_are_named_and_damaged(dtype: torch.dtype) -> None:
    model = nn.Sequential(Rows(sinusoids(BF16).to(dtype)))
    with pytest.warns(PrecisionWarning, match=r"rows\.weight.*rounded phases"):
        safe_rope.protect(model)
    assert [one.what for one in safe_rope.audit(model).damaged] == ["rows.weight"]


def _grid(side: int) -> Tensor:
    rows = sinusoids(torch.float32, side)
    return torch.cat((rows.repeat_interleave(side, 0), rows.repeat(side, 1)), -1)


_RIGHT = {
    "rounded": sinusoids(torch.float32).to(BF16),
    "in FP16": sinusoids(torch.float32).to(FP16),
    "in FP32": sinusoids(torch.float32),
    "of a map": _grid(14),
    "of a large map": _grid(150),
    "words": torch.randn(600, 32, generator=torch.Generator().manual_seed(0)),
    "one of each": torch.eye(64),
    "bits": torch.tensor([[(row >> bit) & 1 for bit in range(8)] for row in range(64)]).float(),
}


@pytest.mark.parametrize("kind", [*_RIGHT])
def test_right_frozen_rows_are_no_damage(kind: str) -> None:
    model = nn.Sequential(Rows(_RIGHT[kind].clone()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        safe_rope.protect(model)
    assert safe_rope.audit(model).ok


class FilledLater(nn.Module):
    """ViTMAE's: zeros, which sinusoids are written to once the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 600, 32), requires_grad=False)

    def fill(self) -> None:
        self.pos_embed.data.copy_(sinusoids(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos_embed.sin()


def test_zeros_that_are_filled_later_are_no_frequencies() -> None:
    model: Any = built(FilledLater).to(BF16)
    assert safe_rope.audit(model).ok
    model["part"].fill()
    assert safe_rope.audit(model).ok


# ---- counts beside weights -----------------------------------------------------------------------------


class Biased(nn.Module):
    """Adds a bias of distances to scores, which it counts in the dtype of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def counts(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=x.dtype, device=x.device)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        counts = self.counts(x, ids)
        bias = -0.1 * (counts[:, None] - counts).abs()
        return (self.query(x) @ self.key(x).mT + bias.to(x.dtype)).softmax(-1) @ x


class ByACast(Biased):
    def counts(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.arange(x.shape[1]).to(self.query.weight.dtype)


class ByAType(Biased):
    def counts(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.arange(x.shape[1]).type_as(x)


class InFP32(Biased):
    def counts(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=torch.float32)


class InIntegers(Biased):
    def counts(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.arange(x.shape[1], device=x.device).to(ids.dtype)


class OfIds(Biased):
    def counts(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=position_ids.dtype)


@pytest.mark.parametrize("way", ["guard", "protect"])
@pytest.mark.parametrize("cls", [Biased, ByACast, ByAType, InFP32, InIntegers, OfIds])
def test_counts_beside_weights_are_as_in_stock_and_named(cls: type[nn.Module], way: str) -> None:
    stock: Any = built(cls).to(BF16)
    x = torch.randn(1, 600, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    if way == "guard":
        with safe_rope.guard() as session:
            model: Any = built(cls)
        report = session.report
    else:
        model = built(cls)
        report = safe_rope.protect(model)
    named = ["counts beside weights" in str(entry) for entry in report.left]
    assert named == [True] * (cls in (Biased, ByACast, ByAType))
    assert not report.protected
    assert not report.unprotected
    assert torch.equal(model.to(BF16)["part"](x, POSITIONS), stock["part"](x, POSITIONS))


class Counting(nn.Module):
    """A counter of its calls, a number that it finds, and a switch, beside frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.tensor(0.0), persistent=False)
        self.register_buffer("shift", torch.tensor(0.0))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.largest.copy_(position_ids.max())
        phases = position_ids[..., None].float() * self.inv_freq.float() + self.shift
        return phases.cos().to(x.dtype) * self.calls, phases.sin().to(x.dtype)


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_number_that_a_forward_changes_is_a_state_as_in_stock(dtype: torch.dtype) -> None:
    stock: Any = built(Counting).to(dtype)
    with safe_rope.guard():
        model: Any = built(Counting)
    model.to(dtype)
    numbers = {name: torch.full_like(one, 0.5) for name, one in stock.state_dict().items()}
    for one in (stock, model):
        one.load_state_dict(numbers)
        for _ in range(3):
            one["part"](X.to(dtype), POSITIONS)
    for name in ("calls", "largest"):
        assert torch.equal(getattr(model["part"], name), getattr(stock["part"], name))
        assert getattr(model["part"], name).dtype == dtype


class Persistent(Amplified):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prefactor", self.prefactor)


@pytest.mark.contract
@pytest.mark.parametrize("way", ["file", "write"])
def test_zero_in_an_amplitude_and_a_number_in_the_place_of_zero_are_meant(way: str) -> None:
    with safe_rope.guard():
        model: Any = nn.ModuleList([built(Counting), built(Persistent)])
    numbers = {"0.part.shift": torch.tensor(0.5), "1.part.prefactor": torch.tensor(0.0)}
    if way == "file":
        model.load_state_dict(numbers, strict=False)
    else:
        with torch.no_grad():
            model[0]["part"].shift.fill_(0.5)
            model[1]["part"].prefactor.zero_()
    made = [one["part"](X, POSITIONS) for one in model]
    phases = POSITIONS[..., None].float() * frequencies() + 0.5
    assert (made[0][1] - phases.sin()).abs().max() < 1e-5
    assert not torch.stack(made[1]).any()


def test_a_number_that_a_parent_counts_up_is_not_held() -> None:
    with safe_rope.guard():
        model: Any = built(Persistent)
    model["part"].prefactor.fill_(1.0)
    for _ in range(199):
        model["part"](X, POSITIONS)
        model["part"].prefactor.add_(1)
    assert model["part"](X, POSITIONS)[0].max() == 200


def test_a_number_that_a_forward_finds_to_be_none_stays() -> None:
    class Lost(Turned):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
            self.seen.fill_(torch.nan)
            return super().forward(x, position_ids)

    stock, model = Lost(), Lost()
    stock(X, POSITIONS)
    model(X, POSITIONS)
    safe_rope.protect(model)
    assert stock.seen.isnan()
    assert model.seen.isnan()
    assert safe_rope.audit(model).ok


class Scaled(Amplified):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([[2.6592]]))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, position_ids)
        return cos + x[..., :1] @ self.scale, sin


def test_a_number_that_a_load_assigns_in_16_bits_goes_into_products_as_in_stock() -> None:
    stock: Any = built(Scaled).to(BF16)
    with safe_rope.guard():
        model: Any = built(Scaled)
    model.to(BF16)
    for one in (stock, model):
        one.load_state_dict({n: v.clone() + 1 for n, v in stock.state_dict().items()}, assign=True)
    true = stock["part"](X.to(BF16), POSITIONS)
    for made, rounded in zip(model["part"](X.to(BF16), POSITIONS), true, strict=True):
        assert made.dtype == rounded.dtype


class Numbered(nn.Module):
    """A number from an attribute of the class, beside frequencies."""

    amplitude = 1.3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10_000.0 ** (torch.arange(0, 32, 2) / 32), persistent=False)
        self.register_buffer("scale", torch.tensor(self.amplitude))

    def forward(self, position_ids: Tensor) -> Tensor:
        phases = position_ids[..., None].float() * self.inv_freq.float()
        return torch.cat((phases.cos(), phases.sin()), -1) * self.scale.float()


def test_a_parameter_that_is_trained_in_the_place_of_an_amplitude_stays() -> None:
    model, stock = Numbered(), Numbered()
    for one in (model, stock):
        del one.scale
        one.scale = nn.Parameter(torch.tensor(4.0))
        one.bfloat16()
    safe_rope.protect(model)
    ids = torch.arange(64)[None]
    exact = Numbered()(ids) / 1.3 * 4
    made = model(ids)
    assert (made - exact).abs().max() < 1e-5
    for one in (model, stock):
        one(ids).sum().backward()
    assert model.scale.grad is not None
    torch.testing.assert_close(model.scale.grad, stock.scale.grad, rtol=0.05, atol=1.0)
