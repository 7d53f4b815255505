"""What a forward computes in low precision is damaged, whatever its tables hold; FP32 arithmetic is ok."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from audited import Model
from torch import nn
from torch.overrides import TorchFunctionMode

import safe_rope

BF16, FP32 = torch.bfloat16, torch.float32
DIM, LENGTH = 64, 600


def frequencies(dtype: torch.dtype = FP32) -> torch.Tensor:
    return 1.0 / 1e4 ** (torch.arange(0, DIM, 2, dtype=dtype) / DIM)


class Exponents(nn.Module):
    """Keeps k / dim, which BF16 holds exactly, and takes its exponential."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("exponents", torch.arange(0, DIM, 2).float() / DIM, persistent=False)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> Any:
        exponents = self.exponents.float() if self.wide else self.exponents
        phases = pos[..., None].float() * torch.exp(-math.log(1e4) * exponents)
        return phases.cos(), phases.sin()


class ExponentsInFP32(Exponents):
    wide = True


class Cached(nn.Module):
    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("dummy", torch.zeros(()), persistent=False)

    @functools.cached_property
    def inv_freq(self) -> torch.Tensor:
        return frequencies(FP32 if self.wide else self.dummy.dtype)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        phases = pos[..., None].to(self.inv_freq.dtype) * self.inv_freq
        return x + torch.cat((phases.cos(), phases.sin()), -1).to(x.dtype)


class CachedInFP32(Cached):
    wide = True


class Grid(nn.Module):
    """DETR's: sines of a grid, in a dtype that it is given."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.features = 16

    def forward(self, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        within = FP32 if self.wide else dtype
        rows = torch.arange(1, shape[-1] + 1, dtype=within, device=device)
        rows = rows / (rows[-1] + 1e-6) * 2 * math.pi
        phases = rows[:, None] / 1e4 ** (
            torch.arange(self.features, device=device).to(within) / self.features
        )
        return torch.stack((phases.sin(), phases.cos()), -1).to(dtype)


class GridInFP32(Grid):
    wide = True


@pytest.mark.parametrize("cls", [Exponents, Cached, Grid])
def test_low_arithmetic_is_damaged(cls: type[nn.Module]) -> None:
    assert safe_rope.audit(Model(cls()).to(BF16)).verdict == "damaged"
    with safe_rope.guard():
        guarded = Model(cls())
    assert safe_rope.audit(guarded.to(BF16)).ok


@pytest.mark.parametrize("cls", [ExponentsInFP32, CachedInFP32, GridInFP32])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_fp32_arithmetic_is_ok(cls: type[nn.Module], dtype: torch.dtype) -> None:
    assert safe_rope.audit(Model(cls()).to(dtype)).ok


def test_what_a_cached_property_has_kept_is_known() -> None:
    model = Model(CachedInFP32())
    model.part(torch.zeros(1, LENGTH, DIM), torch.arange(LENGTH)[None])
    assert safe_rope.audit(model).ok


class Turn:
    @staticmethod
    def apply(held: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return waves(pos[..., None].to(held["inv"].dtype) * held["inv"])


def waves(phases: torch.Tensor) -> torch.Tensor:
    return torch.cat((phases.cos(), phases.sin()), -1)


class HandedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        frozen = nn.Parameter(frequencies(), requires_grad=False)
        self.params = nn.ParameterDict({"inv": frozen})

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return Turn.apply(self.params, x, pos)


def test_frozen_frequencies_that_another_class_turns_are_damaged() -> None:
    assert safe_rope.audit(HandedOn()).ok
    assert safe_rope.audit(HandedOn().to(BF16)).verdict == "damaged"


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", frequencies(), persistent=False)

    def __call__(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return waves(pos[..., None].to(self.freqs.dtype) * self.freqs).to(x.dtype)


def test_a_class_that_is_called_and_has_no_forward_computes_in_fp32() -> None:
    x, pos = torch.zeros(1, LENGTH, DIM), torch.arange(LENGTH)[None]
    true = Called()(x, pos)
    with safe_rope.guard():
        model = Called()
    model.to(BF16)
    assert torch.equal(model(x.to(BF16), pos), true.to(BF16))
    assert safe_rope.audit(model).ok


class PositionsFirst(nn.Module):
    """Its forward takes positions and nothing else, as XGLM's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 32, 2).float() / 32))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        phase = position_ids[..., None].float() * self.inv_freq
        return torch.cat((phase.cos(), phase.sin()), -1)


class ByLengthOfInput(nn.Module):
    """It counts by the length of its input, and takes positions in an odd shape, as PegasusX's."""

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(inputs.shape[1], device=inputs.device)[:, None]
        if position_ids.shape[-1] != 1:
            raise RuntimeError("positions are a column")
        inv_freq = torch.exp(torch.arange(16, device=inputs.device).type_as(inputs) * -0.6)
        return torch.sin(position_ids * inv_freq)


@pytest.mark.parametrize("cls", [PositionsFirst, ByLengthOfInput])
@pytest.mark.parametrize("how", ["FP32", "BF16", "guarded"])
def test_positions_are_given_as_a_forward_takes_them(cls: type[nn.Module], how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), cls())
    if how == "guarded":
        with safe_rope.guard():
            model = nn.Sequential(nn.Linear(4, 4), cls())
    report = safe_rope.audit(model if how == "FP32" else model.to(torch.bfloat16))
    assert report.ok == (how != "BF16")
    assert "multiple values" not in str(report)


def arange(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[-2], device=x.device)


class Sines(nn.Module):
    """Sines of FP32 phases, rounded once, and then the arithmetic of the model's dtype."""

    def forward(self, x: torch.Tensor) -> Any:
        phases = arange(x)[:, None].float() * frequencies()
        return self.used(x, torch.cat((phases.sin(), phases.cos()), -1).to(x.dtype))

    def used(self, x: torch.Tensor, sines: torch.Tensor) -> Any:
        raise NotImplementedError


class Standardised(Sines):
    def used(self, x: torch.Tensor, sines: torch.Tensor) -> Any:
        return (sines - sines.mean(-1, keepdim=True)) / sines.var(-1, keepdim=True)


class Summed(Sines):
    def used(self, x: torch.Tensor, sines: torch.Tensor) -> Any:
        return (x * sines).sum(-2)


class Thresholded(Sines):
    def used(self, x: torch.Tensor, sines: torch.Tensor) -> Any:
        return {"signs": (sines > 0.7).to(x.dtype)}


class Logarithms(Sines):
    def used(self, x: torch.Tensor, sines: torch.Tensor) -> Any:
        return (x * sines).sum(-1).pow(2).clamp(min=1e-6).log()


class Masked(Sines):
    def used(self, x: torch.Tensor, sines: torch.Tensor) -> Any:
        return sines @ sines.mT + torch.full((len(sines), len(sines)), -torch.inf).triu(1).to(x.dtype)


class Jittered(Sines):
    def used(self, x: torch.Tensor, sines: torch.Tensor) -> Any:
        return nn.functional.dropout(sines, 0.5, training=self.training)


@pytest.mark.parametrize("cls", [Standardised, Summed, Thresholded, Logarithms, Masked, Jittered])
def test_what_is_made_of_right_sines_is_not_judged(cls: type[nn.Module]) -> None:
    assert safe_rope.audit(Model(cls()).to(BF16)).ok

    class Low(cls):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> Any:
            phases = arange(x)[:, None].to(x.dtype) * frequencies().to(x.dtype)
            return self.used(x, torch.cat((phases.sin(), phases.cos()), -1))

    assert safe_rope.audit(Model(Low()).to(BF16)).damaged


@pytest.mark.parametrize("by", ["position_ids", "seq_len"])
def test_the_usual_arguments_are_asked_with_in_low_precision(by: str) -> None:
    class ByIds(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            phases = position_ids[..., None].to(x.dtype) * frequencies().to(x.dtype)
            return phases.cos(), phases.sin()

    class ByLength(nn.Module):
        def forward(self, x: torch.Tensor, seq_len: int) -> Any:
            phases = torch.outer(torch.arange(seq_len).to(x.dtype), frequencies().to(x.dtype))
            return phases.cos(), phases.sin()

    report = safe_rope.audit(Model(ByIds() if by == "position_ids" else ByLength()).to(BF16))
    assert [one.what for one in report.damaged] == ["forward"]


@dataclasses.dataclass(slots=True)
class Cache:
    table: torch.Tensor | None = None


class Remembers(nn.Module):
    """It keeps its table in an object that has no dictionary, and refers back to who holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache.table is None:
            self.cache.table = (arange(x)[:, None].to(x.dtype) * frequencies().to(x.dtype)).sin()
        return self.cache.table


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_a_module_remembers_is_left_alone(dtype: torch.dtype) -> None:
    module = Remembers()
    model = Model(module).to(dtype)
    vars(module)["owners"] = [model]
    assert safe_rope.audit(model).ok == (dtype == FP32)
    assert module.cache.table is None


class ByIndex(nn.Module):
    """A table of rows that are chosen, as Canary's."""

    def __init__(self) -> None:
        super().__init__()
        phases = torch.arange(LENGTH)[:, None] * frequencies()
        self.register_buffer("positional_embedding", torch.cat((phases.sin(), phases.cos()), -1) / 16)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.positional_embedding[position_ids]


def test_a_kept_table_that_is_handed_out_in_the_stock_dtype_is_right() -> None:
    with safe_rope.guard():
        model = Model(ByIndex())
    assert safe_rope.audit(model.to(BF16)).ok
    assert safe_rope.audit(Model(ByIndex()).to(BF16)).damaged


class InTheDtypeOfX(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return waves(torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies().to(x.dtype))


class Parts(nn.Module):
    """Its activations have the dtype of one of its parts."""

    def __init__(self, *dtypes: torch.dtype, inside: bool = False) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(DIM, DIM).to(dtype) for dtype in dtypes)
        self.pos = Model(InTheDtypeOfX()).to(dtypes[-1]) if inside else InTheDtypeOfX()


@pytest.mark.parametrize(
    ("dtypes", "inside", "verdict"),
    [
        ((FP32, FP32), False, "ok"),
        ((BF16, BF16), False, "damaged"),
        ((BF16, torch.float16), False, "damaged"),
        ((BF16, FP32), False, "unknown"),
        ((FP32, BF16), False, "unknown"),
        ((BF16, FP32), True, "ok"),
        ((FP32, BF16), True, "damaged"),
    ],
)
def test_the_nearest_parameters_tell_the_dtype(dtypes: Any, inside: bool, verdict: str) -> None:
    assert safe_rope.audit(Parts(*dtypes, inside=inside)).verdict == verdict


class Norm(nn.Module):
    """Sines beside weights, in FP32 or in the dtype of what is given."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = FP32 if self.wide else x.dtype
        phases = arange(x)[:, None].to(dtype) * frequencies().to(dtype)
        return self.norm(x + waves(phases).to(x.dtype))


class Timesteps(nn.Module):
    """Counts in the dtype of its weights."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        dtype = self.mlp[0].weight.dtype
        within = FP32 if self.wide else dtype
        phases = t[:, None].to(within) * torch.exp(torch.arange(0, DIM, 2).to(within) / -7)
        return self.mlp(waves(phases).to(dtype))


class Anchored(nn.Module):
    """Has a parameter for its dtype alone."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        like = self.anchor.float() if self.wide else self.anchor
        return waves(arange(x).to(like)[:, None] * frequencies().to(like)).to(x.dtype)


class LearnedPhases(nn.Module):
    """Sines of what its weights make of positions: nobody says in what precision."""

    wide = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((arange(x)[:, None] / LENGTH).to(x.dtype)).sin()


class Large(Norm):
    """More weights than a copy may have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**22, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(x.shape[1], dtype=x.dtype)
        return self.norm(x + waves(counts[:, None] * frequencies()).to(x.dtype))


BESIDE_WEIGHTS: list[type[nn.Module]] = [Norm, Timesteps, Anchored, LearnedPhases]


@pytest.mark.parametrize("cls", BESIDE_WEIGHTS)
@pytest.mark.parametrize("wide", [True, False])
def test_positions_beside_weights_are_asked_for(cls: type[nn.Module], wide: bool) -> None:
    part = type(cls.__name__, (cls,), {"wide": wide or cls is LearnedPhases, "__module__": __name__})()
    model = Model(part).train().to(BF16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert safe_rope.audit(model).damaged == [] if part.wide else safe_rope.audit(model).damaged
    assert safe_rope.audit(model).ok == part.wide
    after = dict(model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert {one.dtype for one in after.values()} == {BF16}
    assert safe_rope.audit(model.float()).ok


def test_what_is_too_large_to_be_asked_is_unknown_where_its_code_counts_as_it_is_given() -> None:
    assert safe_rope.audit(Model(Large()).to(BF16)).verdict == "unknown"
    assert safe_rope.audit(Model(Large()).float()).ok


def test_nothing_is_called_around_the_parts_of_what_is_asked() -> None:
    model = Model(Norm()).to(BF16)
    called: list[Any] = []
    model.part.norm.register_forward_hook(lambda *given: called.append(given))
    safe_rope.audit(model)
    assert not called


class BesideImages(nn.Module):
    """Takes a timestep for each image, in FP32 or in the dtype of those."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Conv2d(8, 8, 1), nn.Linear(8, 8)

    def times(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        dtype = FP32 if self.wide else x.dtype
        phases = timestep[:, None].to(dtype) * torch.exp(-torch.arange(4)).to(dtype)
        return self.linear(waves(phases).to(x.dtype))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.times(x, timestep)[..., None, None]


class BesideRows(BesideImages):
    """The same for rows of as many channels as its weights have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.times(x, timestep)[:, None]


@pytest.mark.parametrize("cls", [BesideImages, BesideRows])
@pytest.mark.parametrize("wide", [True, False])
def test_timesteps_for_each_of_a_batch_are_asked_for(cls: type[nn.Module], wide: bool) -> None:
    part = type(cls.__name__, (cls,), {"wide": wide, "__module__": __name__})()
    assert safe_rope.audit(Model(part).to(BF16)).ok == wide


class BesideNoise(nn.Module):
    """WaveGrad's: a number for each sample, which images in its place make terabytes of."""

    def forward(self, x: torch.Tensor, noise_level: torch.Tensor) -> torch.Tensor:
        phases = torch.arange(x.shape[-1], dtype=x.dtype)[:, None] * frequencies(x.dtype)
        return x + noise_level[..., None, None] + waves(phases).to(x.dtype).sum()


class _Largest(TorchFunctionMode):
    """Makes nothing that is far too large, and notes it."""

    size = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with contextlib.suppress(RuntimeError):
            shapes = [one.shape for one in args if isinstance(one, torch.Tensor)]
            self.size = max(self.size, math.prod(torch.broadcast_shapes(*shapes)))
        if self.size > 2**30:
            raise MemoryError
        return func(*args, **(kwargs or {}))


def test_no_call_of_the_audit_makes_far_more_than_it_gives() -> None:
    model = Model(BesideNoise()).to(BF16)
    with _Largest() as largest:
        safe_rope.audit(model)
    assert 2**10 < largest.size < 2**30
