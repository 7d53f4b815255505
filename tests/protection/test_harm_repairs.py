"""A module that is damaged is repaired, or named: `protect` after a cast, and writes past every counter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import no_harm
import pytest
import torch
from no_harm import BF16, DIM, FP32, Holder, Rope
from support import families
from support.default_dtype import default_dtype
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning


@pytest.fixture(autouse=True)
def complex_to_real() -> Iterator[None]:
    """torch warns of the imaginary part that a cast of a complex buffer drops."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Casting complex values to real")
        yield


# ---- protect, after it was built in 16 bits ------------------------------------------------------------


class TimescalesInTensors(nn.Module):
    """Keeps the numbers that it is given in tensors of the same names."""

    def __init__(self, least: float = 1.0, most: float = 10000.0) -> None:
        super().__init__()
        self.least, self.most = torch.tensor(least), torch.tensor(most)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = self.least * (self.most / self.least) ** (2 * torch.arange(DIM // 2) / DIM)
        return torch.sin(torch.arange(x.shape[1])[:, None] / scales).to(x.dtype)


@pytest.mark.parametrize("most", [10000.0, 500_000.0])
def test_a_rounded_number_is_no_argument(most: float) -> None:
    x = torch.zeros(1, 300, DIM)
    true = TimescalesInTensors(most=most)(x)
    with default_dtype(BF16):
        model = TimescalesInTensors(most=most)
    if most == 10000.0:  # its default
        safe_rope.protect(model)
        assert (model(x.to(BF16)).float() - true).abs().max() <= 2**-8
    else:
        with pytest.warns(PrecisionWarning, match="most: its constructor cannot be run again"):
            safe_rope.protect(model)


# ---- protect, after a cast -----------------------------------------------------------------------------


class InTheStyleOfXTransformers(nn.Module):
    """Keeps neither its size nor its base, and returns phases."""

    def __init__(self, dim: int, base: float = 10000, base_rescale_factor: float = 1.0) -> None:
        super().__init__()
        base *= base_rescale_factor ** (dim / (dim - 2))
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)
        self.interpolation_factor = 1.0
        self.register_buffer("scale", None)

    def forward(self, t: torch.Tensor) -> tuple[torch.Tensor, float]:
        freqs = torch.einsum("b i, j -> b i j", t.type_as(self.inv_freq), self.inv_freq)
        return torch.stack((freqs, freqs), dim=-1).flatten(-2), 1.0


class InTheStyleOfFairEsm(nn.Module):
    """Rotates q and k itself, by tables that it fills on the way."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)
        self._seq_len_cached: int | None = None
        self._cos_cached: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.arange(k.shape[1], device=k.device).type_as(self.inv_freq)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)[None]
        return tuple(x * emb.cos() + _turned(x) * emb.sin() for x in (q, k))  # type: ignore[return-value]


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


STYLES = {
    "x-transformers": lambda: InTheStyleOfXTransformers(DIM),
    "x-transformers, rescaled": lambda: InTheStyleOfXTransformers(DIM, base_rescale_factor=4.0),
    "fair-esm": lambda: InTheStyleOfFairEsm(DIM),
}


def _repaired(module: nn.Module, truth: Any, name: str = "inv_freq") -> bool:
    return torch.equal(no_harm.in_full_precision(module, name), getattr(truth, name))


@pytest.mark.parametrize("style", STYLES)
def test_what_cannot_be_rebuilt_after_a_cast_is_named(style: str) -> None:
    truth, model = STYLES[style](), Holder(STYLES[style]()).to(BF16)
    said = no_harm.protected(model)
    assert _repaired(model.rope, truth) or said.names("rope", type(truth).__name__)


@pytest.mark.parametrize("style", STYLES)
def test_what_cannot_be_repaired_is_refused_when_strict(style: str) -> None:
    truth, model = STYLES[style](), Holder(STYLES[style]()).to(BF16)
    before = model.rope.inv_freq.clone()
    refused = ""
    try:
        safe_rope.protect(model, strict=True)
    except safe_rope.UnsupportedModelError as error:
        refused = str(error)
    if refused:
        assert type(truth).__name__ in refused
        assert torch.equal(model.rope.inv_freq, before)
    else:
        assert _repaired(model.rope, truth)


class Complex(nn.Module):
    """Phases as complex numbers."""

    def __init__(self, dim: int = DIM, length: int = no_harm.LENGTH, hidden_base: float = 1e4) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(length).float(), no_harm.frequencies(dim, hidden_base))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(phase), phase), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.freqs_cis[: x.shape[-2]]).flatten(-2).to(x.dtype)


class ComplexFromHidden(Complex):
    """Was built with a base that it does not keep."""

    def __init__(self, hidden_base: float) -> None:
        super().__init__(hidden_base=hidden_base)


COMPLEX = {"rebuildable": Complex, "not rebuildable": lambda: ComplexFromHidden(5e5)}


@pytest.mark.parametrize("style", COMPLEX)
def test_phases_that_a_cast_has_made_real_are_repaired_or_named(style: str) -> None:
    truth, model = COMPLEX[style](), Holder(COMPLEX[style]()).to(BF16)
    assert not model.rope.freqs_cis.is_complex(), "a cast does make them real"
    said = no_harm.protected(model)
    x = torch.randn(1, no_harm.LENGTH, DIM, generator=torch.Generator().manual_seed(0)).to(BF16)
    right = model.rope.freqs_cis.is_complex() and torch.equal(model.rope.freqs_cis, truth.freqs_cis)
    right = right and torch.equal(model.rope(x), truth(x))
    assert right or said.names("rope", type(truth).__name__), said.report


@pytest.mark.parametrize("style", COMPLEX)
@pytest.mark.parametrize("load", ["FP32", "zero.Init", "to(bfloat16)", "half and back"])
def test_complex_phases_stay_complex(load: str, style: str, request: pytest.FixtureRequest) -> None:
    if load == "zero.Init":
        request.getfixturevalue("deepspeed_group")
    truth = COMPLEX[style]()
    model, _ = no_harm.guarded(lambda: Holder(COMPLEX[style]()), load)
    x = torch.randn(1, no_harm.LENGTH, DIM, generator=torch.Generator().manual_seed(0))
    for dtype in (FP32, BF16):
        assert torch.equal(model.rope(x.to(dtype)), truth(x.to(dtype)))


@pytest.mark.parametrize("fill", [0.0, float("nan")])
def test_complex_phases_that_are_filled_over_come_back(fill: float) -> None:
    with safe_rope.guard():
        with torch.device("meta"):
            model = Holder(Complex())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.fill_(fill)
        model.load_state_dict(Holder(Complex()).state_dict())
    x = torch.randn(1, no_harm.LENGTH, DIM, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.rope(x), Complex()(x))
    assert safe_rope.audit(model).ok


# ---- values that come past every version counter -------------------------------------------------------


class Finished(nn.Module):
    """A table of sines that is added to what comes in."""

    def __init__(self, length: int = no_harm.LENGTH, dim: int = DIM) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(length).float(), no_harm.frequencies(dim))
        self.register_buffer("table", torch.cat((phase.sin(), phase.cos()), -1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[-2]]


def _low(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().to(BF16).to(tensor.dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("style", ["frequencies", "finished table", "complex"])
def test_rounded_values_written_through_data_are_repaired(style: str, dtype: torch.dtype) -> None:
    make, name = {
        "frequencies": (Rope, "inv_freq"),
        "finished table": (Finished, "table"),
        "complex": (Complex, "freqs_cis"),
    }[style]
    truth, (model, _) = make(), no_harm.guarded(lambda: Holder(make()))
    model = model.to(dtype)
    x = torch.full((1, no_harm.LENGTH, DIM), float(style == "complex"), dtype=dtype)
    args = (x, no_harm.POSITIONS) if make is Rope else (x,)
    model.rope(*args)
    buffer = getattr(model.rope, name)
    if buffer.is_complex():
        torch.view_as_real(buffer.data).copy_(_low(torch.view_as_real(buffer.data)))
    else:
        buffer.data.copy_(_low(buffer.data))
    for got, true in zip(_results(model.rope(*args)), _results(truth(x.float(), *args[1:])), strict=True):
        assert got.dtype == dtype
        assert torch.equal(no_harm.plain(got), true.to(dtype))
    true = getattr(truth, name)
    assert torch.equal(no_harm.in_full_precision(model.rope, name), true)
    shown = no_harm.plain(getattr(model.rope, name))
    assert torch.equal(shown, true if true.is_complex() else true.to(shown.dtype))


def _results(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_rounded_values_written_through_data_of_a_whole_model_are_repaired() -> None:
    """As averaging or broadcasting code writes them, into every buffer of a model."""
    stock = families.build("llama")
    with safe_rope.guard(tables="fp32"):
        model = families.build("llama")
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data.copy_(_low(buffer.data))
    for path, rotary in families.rotary_modules(model).items():
        for got, true in zip(families.read_tables(rotary), families.stock_tables("llama"), strict=True):
            assert torch.equal(got, true), path
        assert torch.equal(rotary.inv_freq, stock.get_submodule(path).inv_freq)
