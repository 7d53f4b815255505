"""What a forward makes and keeps has the stock model's dtype, on every call, in every copy and in files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import safe_rope
from safe_rope.rotation import plain

CALLS = ((True, 300), (False, 300), (False, 6), (False, 300), (True, 7))
"""Whether the model is in training, and how long the sequence is."""


def slopes(count: int = 3) -> torch.Tensor:
    return torch.tensor([0.7 ** (i + 1) for i in range(count)])[:, None]


class BiasInABuffer(nn.Module):
    """A bias that the longest call so far has made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes(), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None or self.bias.shape[-1] < x.shape[1]:
            self.register_buffer("bias", -torch.arange(x.shape[1]) * self.slopes, persistent=False)
        return self.bias[..., : x.shape[1]]


class PhasesInATuple(nn.Module):
    """Phases, of which whoever asked takes the sines, in an attribute."""

    kept: tuple[torch.Tensor, ...] = ()

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kept or len(self.kept[0]) < x.shape[1]:
            self.kept = (torch.outer(torch.arange(x.shape[1]).to(self.inv_freq.dtype), self.inv_freq),)
        return self.kept[0][: x.shape[1]]


class SavedTable(PhasesInATuple):
    """A table that is saved with the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", super().forward(x).cos())
        return self.table[: x.shape[1]]


MODELS = (BiasInABuffer, PhasesInATuple, SavedTable)


def sequence(length: int) -> torch.Tensor:
    return torch.zeros(1, length, 32, dtype=torch.bfloat16)


def guarded(make: Callable[[], nn.Module]) -> nn.Module:
    with safe_rope.guard():
        model = make()
    return model.to(torch.bfloat16)


def dtypes(model: nn.Module) -> list[torch.dtype]:
    found = []
    for training, length in CALLS:
        model.train(training)
        found.append(model(sequence(length)).dtype)
    return found


@pytest.mark.parametrize("make", MODELS)
def test_another_kind_of_call_returns_the_dtype_of_the_first(make: Any) -> None:
    assert dtypes(guarded(make)) == dtypes(make().to(torch.bfloat16)) == [torch.bfloat16] * len(CALLS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("make", MODELS)
def test_a_copy_returns_what_the_model_returns(make: Any, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = guarded(make)
    first = model(sequence(300))
    assert model(sequence(300)).dtype == copied(model)(sequence(300)).dtype == torch.bfloat16
    assert torch.equal(copied(model)(sequence(300)).cos(), first.cos())


def test_phases_that_are_kept_are_exact_in_every_kind_of_call() -> None:
    model, true = guarded(PhasesInATuple), PhasesInATuple()
    for training, length in CALLS:
        cos = model.train(training)(sequence(length)).cos()
        assert torch.equal(cos, true(sequence(length)).cos().to(cos.dtype))


def test_a_file_holds_the_stock_dtype() -> None:
    model, stock = guarded(SavedTable), SavedTable().to(torch.bfloat16)
    for one in (model, stock):
        one(sequence(300))
    saved, expected = model.state_dict(), stock.state_dict()
    assert {n: t.dtype for n, t in saved.items()} == {n: t.dtype for n, t in expected.items()}


class Phases(nn.Module):
    """Phases that somebody else keeps."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).to(self.inv_freq.dtype), self.inv_freq)


class KeptAbove(nn.Module):
    """A layer that keeps, for later calls, what a part of it has made; the file has it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("kept", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) < x.shape[1]:
            self.kept = self.rope(x.shape[1])
        phases = self.kept[: x.shape[1]]
        first, second = self.layer(x).chunk(2, -1)
        cos, sin = phases.cos(), phases.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("change", [lambda t: t, lambda t: t.clone(), copy.deepcopy, lambda t: t.cpu()])
def test_a_file_of_what_a_parent_keeps_is_read_without_safe_rope(change: Callable[[Any], Any]) -> None:
    model, stock, file = guarded(KeptAbove), KeptAbove().to(torch.bfloat16), io.BytesIO()
    for one in (model, stock):
        one(sequence(300))
    saved = {name: change(tensor) for name, tensor in model.state_dict().items()}
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {n: type(t) for n, t in loaded.items()} == dict.fromkeys(stock.state_dict(), torch.Tensor)
    assert {n: t.dtype for n, t in loaded.items()} == {n: t.dtype for n, t in stock.state_dict().items()}
    assert torch.equal(loaded["kept"], KeptAbove().rope(300).to(torch.bfloat16))


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [lambda t: t, lambda t: t.clone(), lambda t: t.data, copy.deepcopy])
@pytest.mark.parametrize("form", [True, False], ids=["zip", "legacy"])
def test_a_file_of_buffers_is_read_without_safe_rope(
    first: torch.dtype, change: Callable[[Any], Any], *, form: bool
) -> None:
    """They are those that nobody detaches: of ``named_buffers()``, or of a state_dict with its variables."""
    with safe_rope.guard():
        model = KeptAbove()
    model.to(first)(sequence(300).to(first))
    model.to(torch.bfloat16)
    true = KeptAbove().rope(300).to(torch.bfloat16)
    for held in (dict(model.named_buffers()), model.state_dict(keep_vars=True)):
        file, saved = io.BytesIO(), [{"buffers": {name: change(tensor) for name, tensor in held.items()}}]
        torch.save(saved, file, _use_new_zipfile_serialization=form)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)[0]["buffers"]["kept"]
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, true)
    file = io.BytesIO()
    torch.save({"model": model, "buffers": dict(model.named_buffers())}, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)["model"]
    assert torch.equal(again(sequence(300)), model(sequence(300)))


class KeptByAHolder(nn.Module):
    """As above, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases()
        self.register_buffer("kept", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) < x.shape[1]:
            self.register_buffer("kept", self.rope(x.shape[1]), persistent=False)
        return x[..., :16] * self.kept[: x.shape[1]].cos()


class KeptBesideWeights(nn.Module):
    """Makes its phases itself."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(16, 16)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))
        self.register_buffer("kept", None, persistent=False)

    def phases(self, count: int) -> torch.Tensor:
        return torch.outer(torch.arange(count).float(), self.inv_freq)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) < x.shape[1]:
            self.kept = self.phases(x.shape[1])
        return self.value(x[..., :16]) * self.kept[: x.shape[1]].cos().to(x.dtype)


class KeptWithoutATable(KeptBesideWeights):
    """Makes its frequencies, too, and has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Identity()
        del self.inv_freq

    def phases(self, count: int) -> torch.Tensor:
        inv_freq = 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32)
        return torch.outer(torch.arange(count).float(), inv_freq).view(count, 1, 16).transpose(0, 1)[0]


def in_16_bits(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


AFTER_A_CALL: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cast": in_16_bits,
    "copied": lambda model: in_16_bits(copy.deepcopy(model)),
    "cast in a container": lambda model: in_16_bits(nn.Sequential(model)),
    "half": lambda model: in_16_bits(model.half().float()),
    "twice": lambda model: in_16_bits(copy.deepcopy(in_16_bits(model)).float()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("change", AFTER_A_CALL.values(), ids=[*AFTER_A_CALL])
@pytest.mark.parametrize("make", [KeptAbove, KeptByAHolder, KeptBesideWeights, KeptWithoutATable])
def test_phases_that_are_kept_of_a_call_in_fp32_are_not_rounded(
    make: Any, change: Callable[[nn.Module], nn.Module], how: str, inference: bool
) -> None:
    torch.manual_seed(0)
    x, true = torch.randn(1, 1000, 32).bfloat16(), make().to(torch.bfloat16).float()
    if hasattr(true, "rope"):
        true.rope = Phases()
    elif hasattr(true, "inv_freq"):
        true.inv_freq = make().inv_freq
    if how == "guard":
        with safe_rope.guard():
            model = make()
    else:
        model = make()
        safe_rope.protect(model)
    model.load_state_dict(true.state_dict())
    with torch.inference_mode(inference), torch.no_grad():
        model(x.float())
        got = change(model)(x)
    assert got.dtype == torch.bfloat16
    with torch.no_grad():
        assert (got.float() - true(x.float())).abs().max() < 2**-5


@pytest.mark.parametrize("make", [KeptAbove, KeptByAHolder])
def test_what_a_parent_keeps_is_a_plain_tensor_in_fp32(make: Any) -> None:
    with safe_rope.guard():
        model = make()
    x = torch.randn(1, 300, 32)
    expected = model(x)
    assert torch.equal(model.to(torch.bfloat16).float().rope(300), Phases()(300))
    assert type(model.kept) is torch.Tensor
    assert torch.equal(model.kept, Phases()(300))
    assert model(x).dtype == expected.dtype


class ReadsWhatItKeeps(nn.Module):
    """Takes cosines of phases that a part keeps."""

    def __init__(self, kept: nn.Module) -> None:
        super().__init__()
        self.kept = kept
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(x) + self.linear(x[..., :16] * self.kept.kept[: x.shape[1]].cos())


@pytest.mark.parametrize("make", [KeptBesideWeights, KeptWithoutATable])
def test_phases_that_are_kept_have_the_stock_dtype_outside(make: Any) -> None:
    x = torch.randn(1, 300, 32)
    with safe_rope.guard():
        model = ReadsWhatItKeeps(make())
    expected = model(x)
    got = model.to(torch.bfloat16)(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).abs().max() < 2**-4


class KeptActivations(nn.Module):
    """Keeps keys beside its table, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(32, 32)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("mean", torch.zeros(32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phases = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq)
        new = self.key(x) * torch.cat((phases, phases), -1).cos().to(x.dtype)
        self.keys = new if self.keys is None else torch.cat((self.keys, new), 1)
        self.mean.lerp_(new.mean((0, 1)), 0.1)
        return self.keys.sum(1) + self.mean


@torch.no_grad()
def test_activations_that_are_kept_are_as_in_stock() -> None:
    x, stock = torch.randn(1, 30, 32), KeptActivations()
    with safe_rope.guard():
        model = KeptActivations()
    model.load_state_dict(stock.state_dict())
    for change in (torch.float32, torch.float32, torch.bfloat16):
        got, expected = model.to(change)(x.to(change)), stock.to(change)(x.to(change))
        assert got.dtype == expected.dtype == model.keys.dtype == model.mean.dtype
        assert (got.float() - expected.float()).abs().max() < (1e-6 if change == torch.float32 else 0.5)


def _loaded_from_its_own_file(model: nn.Module, x: torch.Tensor, folder: Path) -> torch.Tensor:
    torch.save(model.state_dict(), folder / "state.pt")
    model.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return model(x)  # type: ignore[no-any-return]


def _of_data_parallel(model: nn.Module, x: torch.Tensor, folder: Path) -> torch.Tensor:
    is_ours = not torch.distributed.is_initialized()
    if is_ours:
        torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(x)
        return parallel(x)  # type: ignore[no-any-return]
    finally:
        if is_ours:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("used", [_loaded_from_its_own_file, _of_data_parallel])
def test_what_a_parent_keeps_is_not_rounded_by_its_own_values_in_16_bits(used: Any, tmp_path: Path) -> None:
    x = torch.randn(1, 1000, 32).bfloat16()
    model = guarded(KeptAbove)
    expected = model(x)
    assert torch.equal(used(model, x, tmp_path), expected)
    model.load_state_dict({"kept": torch.full((1000, 16), 0.5)}, strict=False)
    assert torch.equal(model.kept, torch.full((1000, 16), 0.5, dtype=torch.bfloat16))


class MapsWhatItKeeps(PhasesInATuple):
    """Casts its own attribute."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.kept = tuple(map(fn, self.kept))
        return self


class CosInAnAttribute(PhasesInATuple):
    """Cosines in an attribute, which no cast reaches."""

    cos: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cos is None:
            self.cos = super().forward(x).cos()
        return self.cos[: x.shape[1]]


@pytest.mark.parametrize("cast", ["float", "half", "double"])
@pytest.mark.parametrize("make", [*MODELS, MapsWhatItKeeps, CosInAnAttribute])
def test_a_later_cast_reaches_what_it_reaches_in_stock(make: Any, cast: str) -> None:
    model, stock = guarded(make), make().to(torch.bfloat16)
    for one in (model, stock):
        one(sequence(300))
        getattr(one, cast)()
    x = sequence(300).to(stock.state_dict()["inv_freq"].dtype if hasattr(stock, "dim") else torch.float32)
    for _ in range(2):
        saved, expected = model.state_dict(), stock.state_dict()
        assert {n: t.dtype for n, t in saved.items()} == {n: t.dtype for n, t in expected.items()}
        assert model(x).dtype == stock(x).dtype


class MapsAttributes(nn.Module):
    """Casts its own attribute, and computes in its dtype."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.dim, self.trained = dim, nn.Linear(dim, dim)
        self.cos = torch.outer(torch.arange(64.0), 1.0 / 10000 ** (torch.arange(0, dim, 1) / dim)).cos()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn)
        self.cos = fn(self.cos)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x) * self.cos[: x.shape[1]]


def test_what_an_own_apply_casts_has_the_dtype_that_it_was_cast_to_last() -> None:
    with safe_rope.guard():
        model = MapsAttributes()
    stock = MapsAttributes()
    for change in ("bfloat16", "cpu", "half", "float", "bfloat16"):
        for one in (model, stock):
            getattr(one, change)()
        x = torch.zeros(1, 60, 32, dtype=stock.trained.weight.dtype)
        assert model(x).dtype == stock(x).dtype
    assert torch.equal(model.cos, MapsAttributes().cos)


class Stretches(nn.Module):
    """Changes its frequencies in place and makes its table anew, in one call."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1 / 100 ** (torch.arange(0, 32, 2).float() / 32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.make(80)

    def make(self, count: int) -> None:
        phases = torch.arange(count).float()[:, None] * self.inv_freq.float()
        self.register_buffer("cos", phases.cos(), persistent=False)

    def stretch(self, count: int) -> None:
        self.inv_freq.mul_(0.5)
        self.make(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.cos):
            self.stretch(x.shape[1])
        return self.cos[: x.shape[1]].to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["method", "forward"])
def test_a_change_in_place_is_made_once(way: str, dtype: torch.dtype) -> None:
    true = Stretches()
    true.stretch(100)
    with safe_rope.guard():
        module = Stretches()
    module.to(dtype)
    if way == "method":
        module.stretch(100)
    for _ in range(2):
        made = module(torch.zeros(1, 100, 32, dtype=dtype))
        assert torch.equal(made, true.cos.to(dtype))


class CastsWhatItKeeps(KeptAbove):
    """Casts cosines of what it keeps to the dtype of its activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.kept[: x.shape[1], :1].cos().to(x.dtype)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_an_exported_program_takes_what_a_parent_keeps(first: torch.dtype) -> None:
    x, model = torch.randn(1, 300, 32), guarded(CastsWhatItKeeps).float()
    model.to(first)(x.to(first))
    model.to(torch.bfloat16)
    with torch.no_grad():
        expected = model(x.bfloat16())
        assert torch.equal(torch.export.export(model, (x.bfloat16(),)).module()(x.bfloat16()), expected)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_what_is_assigned_to_the_data_of_what_a_parent_keeps_is_shown(first: torch.dtype) -> None:
    x, model, stock = torch.randn(1, 300, 32), guarded(KeptAbove).float(), KeptAbove()
    for one in (model, stock):
        one.to(first)(x.to(first))
        one.to(torch.bfloat16)
    exact = KeptAbove()
    exact(x)
    for change in (torch.Tensor.float, torch.Tensor.half, lambda kept: kept[:200], torch.zeros_like):
        for one in (model, stock):
            one.kept.data = change(one.kept.data)
        assert (model.kept.dtype, model.kept.shape) == (stock.kept.dtype, stock.kept.shape)
        told = plain(model.kept).float()
        wanted = exact.kept[: len(told)] if change is not torch.zeros_like else torch.zeros_like(told)
        assert torch.allclose(told.cos(), wanted.cos(), atol=1e-6)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_an_average_of_a_model_takes_the_buffers_that_a_parent_keeps(first: torch.dtype) -> None:
    """They are written to in a list, beside those that have the model's dtype."""
    x, model, true = torch.randn(1, 300, 32).bfloat16(), guarded(KeptAbove).to(first), KeptAbove()
    model(x.to(first))
    averaged = AveragedModel(model.bfloat16(), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(model)
    true.load_state_dict({name: values.float() for name, values in model.state_dict().items()}, strict=False)
    true.rope, true.kept = Phases(), None
    assert averaged(x).dtype == torch.bfloat16
    assert (averaged(x).float() - true(x.float())).abs().max() < 2**-4


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_what_a_parent_keeps_has_the_shape_that_is_given_to_it(first: torch.dtype) -> None:
    x, model, stock = torch.randn(1, 300, 32), guarded(KeptAbove).float(), KeptAbove()
    for one in (model, stock):
        one.to(first)(x.to(first))
        one.to(torch.bfloat16)
    ones = torch.ones(7, 16, dtype=torch.bfloat16)
    changes: tuple[Callable[[torch.Tensor], Any], ...] = (
        torch.Tensor.t_,
        lambda kept: kept.unsqueeze_(0),
        lambda kept: kept.resize_(4, 16).zero_(),
        lambda kept: kept.set_(ones.clone()),
        lambda kept: kept.set_(ones.clone().untyped_storage(), 16, (3, 16), (16, 1)),
    )
    for change in changes:
        for one in (model, stock):
            change(one.kept)
        for what in (torch.Tensor.size, torch.Tensor.stride, lambda kept: kept.dtype):
            assert what(model.kept) == what(stock.kept)
        is_given = stock.kept.size(0) < 8 and stock.kept.dim() == 2
        assert not is_given or torch.equal(plain(model.kept).to(torch.bfloat16), stock.kept)
