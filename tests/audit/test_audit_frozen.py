"""audit() measures frozen position tables that torch has put something around, and frozen numbers."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import safe_rope
from safe_rope.errors import PrecisionWarning

DIM, ROWS = 32, 64


class Tables(nn.Module):
    def __init__(self, rows: int = ROWS, dim: int = DIM) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        phases = torch.arange(rows)[:, None] * rates
        self.pos_emb = nn.Parameter(torch.cat((phases.sin(), phases.cos()), -1), requires_grad=False)
        self.inv_freq = nn.Parameter(rates, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos_emb[: x.shape[1]].to(x.dtype)


class Same(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value


class Twice(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        parametrizations.spectral_norm(self, "weight")

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class NormedWaves(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() @ self.weight + x.cos()


class LogBase(nn.Module):
    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.log_base = nn.Parameter(torch.tensor(math.log(base)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.exp(-self.log_base.float() * torch.arange(0, self.dim, 2) / self.dim)
        phases = torch.outer(torch.arange(x.shape[1]), rates)
        return torch.cat((phases.sin(), phases.cos()), -1)


class Inv(nn.Module):
    def __init__(self, dim: int = DIM, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        phases = position_ids[..., None].float() * self.inv_freq.float()
        both = torch.cat((phases, phases), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


@pytest.mark.contract
@pytest.mark.parametrize("names", [("pos_emb",), ("inv_freq",), ("pos_emb", "inv_freq")])
def test_a_frozen_table_under_a_parametrization_is_measured(names: tuple[str, ...]) -> None:
    verdicts = []
    for make in (lambda model: model, lambda model: model.bfloat16()):
        model: nn.Module = nn.Sequential(Tables())
        for name in names:
            parametrize.register_parametrization(model[0], name, Same())  # type: ignore[index]
        report = safe_rope.audit(make(model))
        assert report.modules, str(report)
        verdicts.append(report.verdict)
    assert verdicts == ["ok", "damaged"]


@pytest.mark.contract
def test_protect_names_a_frozen_table_under_a_parametrization() -> None:
    model = Tables()
    parametrize.register_parametrization(model, "pos_emb", Same())
    said = str(safe_rope.protect(nn.Sequential(model)))
    assert "pos_emb is a frozen parameter" in said
    assert "inv_freq is a frozen parameter" in said


@pytest.mark.contract
@pytest.mark.parametrize("make", [Inv, Tables])
def test_what_a_parametrization_makes_of_right_values_is_not_called_damaged(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    parametrize.register_parametrization(model, "inv_freq", Twice())
    assert safe_rope.audit(nn.Sequential(model)).verdict == "unknown"


@pytest.mark.contract
@pytest.mark.parametrize("look", [safe_rope.audit, safe_rope.protect])
@pytest.mark.parametrize("cls", [Normed, NormedWaves])
def test_a_frozen_weight_with_a_spectral_norm_is_left_alone(
    cls: Callable[[], nn.Module], look: Callable[[nn.Module], object]
) -> None:
    model = nn.Sequential(cls()).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    look(model)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.usefixtures("deepspeed_group")
def test_a_frozen_table_of_a_sharded_module_is_measured() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    mesh, verdicts = torch.distributed.init_device_mesh("cpu", (1,)), []
    for low in (False, True):
        model = nn.Sequential(Tables())
        model = model.bfloat16() if low else model
        fsdp.fully_shard(model[0], mesh=mesh)
        verdicts.append(safe_rope.audit(model).verdict)
    assert verdicts == ["ok", "damaged"]


class OfABatch(nn.Module):
    """A frozen table with a first dimension of one, over which its rows are sharded."""

    def __init__(self) -> None:
        super().__init__()
        phases = torch.outer(torch.arange(ROWS).float(), 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)))
        sines = torch.cat((phases.sin(), phases.cos()), -1)[None]
        self.pos_embed = nn.Parameter(sines, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos_embed


@pytest.mark.usefixtures("deepspeed_group")
@pytest.mark.parametrize("late", [False, True])
def test_a_frozen_table_of_a_batch_is_sharded_in_a_guard(late: bool) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    with contextlib.nullcontext() if late else safe_rope.guard():
        model = nn.Sequential(OfABatch())
        model = model.bfloat16().float() if late else model
        fsdp.fully_shard(model, mesh=mesh)
    if late:
        assert not safe_rope.audit(model).ok
        safe_rope.protect(model)
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert torch.equal(model[0].pos_embed.to_local(), OfABatch().pos_embed)


class Words(nn.Module):
    """Words, or positions that nothing says to be some, in a class that takes sines of what it counts."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.wte = nn.Embedding(*rows.shape)
        self.wte.weight = nn.Parameter(rows.clone(), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.sin(self.wte(ids) * torch.arange(ids.shape[1])[:, None])


@pytest.mark.usefixtures("deepspeed_group")
@pytest.mark.parametrize("are_positions", [False, True])
def test_frozen_words_that_zero_3_has_partitioned_are_no_positions(are_positions: bool) -> None:
    import deepspeed

    rows = Tables().pos_emb.detach() if are_positions else torch.randn(ROWS, DIM)
    found = []
    for is_partitioned in (False, True):
        model = nn.Sequential(Words(rows)).bfloat16()
        if is_partitioned:
            deepspeed.zero.Init(module=model, dtype=torch.bfloat16)
            assert not model[0].wte.weight.numel()
        found.append(any("wte" in one.what for one in safe_rope.audit(model).findings))
    assert found == [are_positions] * 2


@pytest.mark.contract
def test_a_frozen_number_that_a_cast_has_rounded_is_not_ok() -> None:
    x, low = torch.zeros(1, 600, DIM), LogBase().bfloat16()
    assert (low(x) - LogBase()(x)).abs().max() > 0.5
    assert safe_rope.audit(nn.Sequential(LogBase())).verdict == "ok"
    assert safe_rope.audit(nn.Sequential(low)).verdict == "unknown"
    exact = LogBase(base=math.exp(8.0)).bfloat16()  # 16 bits have its logarithm
    assert safe_rope.audit(nn.Sequential(exact)).verdict == "ok"


class OneFrequency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.tensor([1.0]), requires_grad=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions[:, None] * self.freqs).sin()


def test_a_frozen_frequency_alone_is_measured() -> None:
    report = safe_rope.audit(nn.Sequential(nn.Linear(2, 2), OneFrequency()))
    assert "cannot be measured" not in str(report)
    assert report.ok, str(report)


class WholeSpeeds(nn.Module):
    """A layer whose sines turn at whole speeds, as Hyena's filters and periodic angles do."""

    def __init__(self, speeds: Tensor) -> None:
        super().__init__()
        self.freq = nn.Parameter(speeds.clone(), requires_grad=False)
        self.linear = nn.Linear(1, len(speeds))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.freq * self.linear(x))


@pytest.mark.contract
@pytest.mark.parametrize(
    ("speeds", "is_damaged"),
    [
        (torch.full((DIM,), 10.0), False),
        (torch.arange(1, DIM + 1).float(), False),
        (torch.arange(1, DIM + 1) + 0.3, True),
        (torch.linspace(140.3, 250.4, DIM), True),
        (torch.cat([torch.zeros(1), torch.linspace(140.3, 250.4, DIM - 1)]), True),
    ],
)
@pytest.mark.parametrize("guarded", [True, False])
def test_frozen_speeds_that_16_bits_hold_are_not_damaged(
    speeds: Tensor, is_damaged: bool, guarded: bool
) -> None:
    with safe_rope.guard() if guarded else contextlib.nullcontext():
        model = nn.Sequential(WholeSpeeds(speeds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        assert (safe_rope.audit(model.bfloat16()).verdict == "damaged") == is_damaged
