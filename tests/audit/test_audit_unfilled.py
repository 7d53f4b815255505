"""audit() names tables that hold one number everywhere where no constructor tells what they should hold."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from support.default_dtype import default_dtype
from torch import nn
from torch.optim.swa_utils import AveragedModel

import safe_rope

DIM, ROWS = 32, 64


def phases(dim: int) -> torch.Tensor:
    return torch.outer(torch.arange(ROWS).float(), 10000.0 ** -(torch.arange(0, dim, 2).float() / dim))


class Frequencies(nn.Module):
    """Its arguments are kept nowhere: nobody can run its constructor again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer(
            "inv_freq", 10000.0 ** -(torch.arange(0, dim, 2).float() / dim), persistent=False
        )

    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).type_as(self.inv_freq), self.inv_freq).repeat(1, 2)


class Kept(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("cos_cached", phases(dim).cos(), persistent=False)
        self.register_buffer("sin_cached", phases(dim).sin(), persistent=False)

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos_cached[:length], self.sin_cached[:length]


class Slopes(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -(torch.arange(1, dim + 1) * 8 / dim), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return self.slopes[:, None, None] * torch.arange(length)


class FillsLater(nn.Module):
    """What is empty is filled by the first forward, and is meant so."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("cos_table", torch.zeros(ROWS, dim // 2), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        self.cos_table = phases(2 * self.cos_table.shape[-1]).cos()
        return self.cos_table[:length]


class FirstRow(nn.Module):
    """The cosines of position 0 are 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.zeros(dim).cos(), persistent=False)
        self.register_buffer("attention_mask", torch.ones(4, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cos


class Extended(nn.Module):
    """Its constructor makes no table: its parent has another method make it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def extend(self, count: int) -> None:
        rows = torch.outer(torch.arange(count).float(), 10000.0 ** -(torch.arange(0, self.dim).float()))
        self.register_buffer("pe", rows.sin()[None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[:, : x.shape[1]]


class Extending(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.encoding = Extended(dim)
        self.encoding.extend(ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoding(self.linear(x))


@pytest.mark.parametrize("number", [0.0, 1e-30, 1.0])
def test_what_a_method_has_made_after_the_constructor_is_named(number: float) -> None:
    with torch.device("meta"):
        model = Extending(DIM)
    true = Extending(DIM)
    assert safe_rope.audit(true).verdict != "damaged"
    model.to_empty(device="cpu").load_state_dict(true.state_dict())
    model.encoding.pe.fill_(number)
    x = torch.zeros(1, ROWS, DIM)
    assert (model(x) - true(x)).abs().max() > 0.5
    report = safe_rope.audit(model)
    assert report.verdict == "unknown", str(report)
    assert f"each of its numbers is {number:g}" in report.findings[0].source


@pytest.mark.parametrize("number", [0.0, 1e-30, 1.0])
@pytest.mark.parametrize("make", [Frequencies, Kept, Slopes])
def test_what_nobody_has_filled_is_named(make: Callable[[int], nn.Module], number: float) -> None:
    with torch.device("meta"):
        model = nn.Sequential(make(DIM))
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(number)
    report = safe_rope.audit(model)
    assert not report.ok
    names = [name for name, _ in model[0].named_buffers()]
    assert [(found.what, found.severity) for found in report.findings] == [(n, "unknown") for n in names]
    assert f"each of its numbers is {number:g}" in report.findings[0].source


class HasNoShape(nn.Module):
    """The first forward of a lazy module says what shape its table has."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", nn.UninitializedBuffer(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(x, self.inv_freq).sin()


@pytest.mark.parametrize("make", [FillsLater, FirstRow, HasNoShape])
def test_what_is_meant_so_is_not(make: Callable[[int], nn.Module]) -> None:
    report = safe_rope.audit(nn.Sequential(make(DIM)))
    assert not [found for found in report.findings if "each of its numbers" in found.source], str(report)


class Finished(nn.Module):
    """Performer's: neither its forward nor the name of its table says what it is."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("emb", torch.cat((phases(dim).sin(), phases(dim).cos()), -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb[None, : x.shape[1]].to(x)


class Windowed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("window", torch.arange(dim).mul(torch.pi / dim).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.window


@pytest.mark.parametrize(("make", "is_named"), [(Finished, True), (Windowed, False)])
def test_a_table_that_only_a_constructor_makes_is_damaged_as_no_number(
    make: Callable[[int], nn.Module], is_named: bool
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(make(DIM))
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(torch.nan)
    assert [found.what for found in safe_rope.audit(model).damaged] == ["emb"] * is_named
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert bool(safe_rope.protect(model).unprotected) == is_named


class Sines(nn.Module):
    """What its buffer is called says nothing, and its argument is kept nowhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("rows_", phases(width).sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows_[: x.shape[1]]


class Phasors(Sines):
    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        rows = phases(width)
        self.register_buffer("rows_", torch.polar(torch.ones_like(rows), rows), persistent=False)


class Statistics(nn.Module):
    """It takes sines, and counts what it has seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(width))
        self.register_buffer("offset_", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.offset_).sin()


@pytest.mark.parametrize("number", [0.0, 1e-40, 1e35])
@pytest.mark.parametrize("make", [Sines, Phasors])
def test_a_table_whose_name_says_nothing_is_not_ok_where_nobody_has_filled_it(
    make: Callable[[int], nn.Module], number: float
) -> None:
    model = make(DIM)
    assert safe_rope.audit(model).verdict != "damaged"
    model.get_buffer("rows_").fill_(number)
    assert safe_rope.audit(nn.Sequential(model)).verdict == "unknown"


def test_zeros_of_a_module_that_counts_nothing_are_no_table() -> None:
    assert safe_rope.audit(nn.Sequential(Statistics(DIM))).verdict == "ok"


class Property(nn.Module):
    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        self.width = width

    @functools.cached_property
    def cos(self) -> torch.Tensor:
        return phases(self.width).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cos[: x.shape[1]]


def test_a_cached_property_that_holds_zeros_is_damaged() -> None:
    model = Property()
    assert model.cos.any()
    assert safe_rope.audit(nn.Sequential(model)).ok
    model.cos.zero_()
    assert safe_rope.audit(nn.Sequential(model)).verdict == "damaged"


class Learned(nn.Module):
    """Looks up learned positions by a count that no checkpoint holds, beside integers that count nothing."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.weights = nn.Embedding(rows, DIM)
        self.register_buffer("position_ids", torch.arange(rows)[None], persistent=False)
        self.register_buffer("kinds", torch.zeros(1, rows, dtype=torch.int64), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        positions: torch.Tensor = self.weights(self.position_ids[:, :length])
        return positions


def on_fresh_memory(held: int) -> nn.Module:
    with torch.device("meta"):
        module = Learned(ROWS)
    module.to_empty(device="cpu")
    for buffer in (module.position_ids, module.kinds):
        buffer.fill_(held)
    return module


@pytest.mark.parametrize("held", [0, 7, -1, 2**40])
def test_a_count_that_was_never_filled_is_not_ok(held: int) -> None:
    true = Learned(ROWS)
    module = on_fresh_memory(held)
    module.load_state_dict(true.state_dict())
    if 0 <= held < ROWS:
        assert not torch.equal(module(ROWS), true(ROWS))
    report = safe_rope.audit(nn.Sequential(module))
    (finding,) = report.findings
    assert (finding.path, finding.what, finding.severity) == ("0", "position_ids", "unknown")
    assert [(one.path, one.verdict) for one in report.modules] == [("0", "unknown")]


@pytest.mark.parametrize("change", [lambda ids: ids + 2, lambda ids: ids.flip(-1), lambda ids: ids // 2])
def test_a_count_that_somebody_has_changed_is_left_alone(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    module = Learned(ROWS)
    assert not safe_rope.audit(module).modules
    module.position_ids = change(module.position_ids)
    assert not safe_rope.audit(module).modules


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.arange(-ROWS, ROWS),
        lambda: -torch.arange(ROWS, dtype=torch.int32),
        lambda: torch.arange(ROWS)[None] - torch.arange(ROWS)[:, None],
        lambda: torch.arange(ROWS) * 2**33,
    ],
)
def test_counts_below_zero_or_far_beyond_are_as_right_as_others(made: Callable[[], torch.Tensor]) -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("distances", made(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.distances.flatten()[: x.shape[0]]

    module = Distances()
    report = safe_rope.audit(nn.Sequential(module))
    assert report.ok, str(report)
    module.distances.fill_(7)
    assert safe_rope.audit(nn.Sequential(module)).verdict == "unknown"


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "nested"])
def test_integers_that_nobody_can_compare_are_left_alone(kind: str) -> None:
    rows = torch.eye(ROWS).long()
    module = Learned(ROWS)
    kept = torch.nested.nested_tensor(list(rows)) if kind == "nested" else getattr(rows, kind)()
    module.register_buffer("edges", kept, persistent=False)
    assert not safe_rope.audit(module).findings


class Later(nn.Module):
    """Its constructor makes memory, and whoever holds it fills that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(DIM // 2), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phase = position_ids[..., None].float() * self.inv_freq.float()
        return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Later()
        with torch.no_grad():
            self.rotary.inv_freq.copy_(10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM))


@pytest.mark.contract
def test_answers_of_memory_that_another_fills_are_unknown_and_not_damaged() -> None:
    made = [(torch.linspace(1, 0, DIM // 2) * 7).clone() for _ in range(64)]
    model = Filling()
    del made  # what torch.empty gets again
    assert safe_rope.audit(model).verdict == "unknown"
    assert safe_rope.audit(model.bfloat16()).verdict != "ok"


class OldMemory(Later):
    """Its memory is from torch's old constructor, which no function of torch gives."""

    def __init__(self, dim: int = DIM) -> None:
        nn.Module.__init__(self)
        self.register_buffer("inv_freq", torch.FloatTensor(dim // 2), persistent=False)


class OldRows(nn.Module):
    def __init__(self, rows: int = ROWS, dim: int = DIM) -> None:
        super().__init__()
        self.register_buffer("pe", torch.Tensor(rows, dim))

    def forward(self, length: int) -> torch.Tensor:
        return self.pe[:length]


class OldRowsBesideWeights(OldRows):
    """Computes with its weights, which are real wherever it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(4))
        self.total = float(self.weights.sum())


@pytest.mark.parametrize("make", [OldMemory, OldRows, OldRowsBesideWeights])
@pytest.mark.parametrize("guarded", [False, True])
def test_memory_of_the_old_constructor_that_another_fills_is_unknown_and_not_damaged(
    make: type[nn.Module], guarded: bool
) -> None:
    with safe_rope.guard() if guarded else contextlib.nullcontext():
        model = nn.Sequential(make())
    ((_, table),) = model.named_buffers()
    with torch.no_grad():
        freqs = 10000.0 ** -(torch.arange(0, DIM, 2).float() / DIM)
        table.copy_(freqs if table.dim() == 1 else torch.outer(torch.arange(ROWS), freqs).sin().repeat(1, 2))
    assert safe_rope.audit(model).verdict == "unknown" or guarded
    assert safe_rope.audit(model).verdict != "damaged"


def test_memory_of_the_old_constructor_that_it_fills_itself_is_kept() -> None:
    class Filled(Later):
        def __init__(self) -> None:
            super().__init__()
            self.inv_freq = torch.FloatTensor(DIM // 2)
            for index in range(DIM // 2):
                self.inv_freq[index] = 10000.0 ** (-2 * index / DIM)

    model = nn.Sequential(Filled())
    assert safe_rope.audit(model).ok
    safe_rope.protect(model.bfloat16())
    assert torch.equal(model[0].inv_freq, Filled().inv_freq)
    assert safe_rope.audit(model).ok


class Relative(nn.Module):
    """Swin's: the place of each pair in a table of biases."""

    def __init__(self, window: int = 7, heads: int = 3) -> None:
        super().__init__()
        self.window, self.heads = window, heads
        grid = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        flat = torch.stack(grid).flatten(1)
        between = flat[:, :, None] - flat[:, None, :] + window - 1
        index = between[0] * (2 * window - 1) + between[1]
        self.register_buffer("relative_position_index", index, persistent=False)
        self.biases = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.biases[self.relative_position_index].permute(2, 0, 1)


def test_an_index_of_other_places_within_range_is_unknown() -> None:
    module = Relative()
    assert not safe_rope.audit(module).modules
    index = module.relative_position_index
    order = torch.randperm(index.numel(), generator=torch.Generator().manual_seed(0))
    module.relative_position_index = index.flatten()[order].view_as(index)
    assert int(module.relative_position_index.max()) < len(module.biases)
    (finding,) = safe_rope.audit(nn.Sequential(module)).findings
    assert (finding.path, finding.what, finding.severity) == ("0", "relative_position_index", "unknown")


class LogPlaces(nn.Module):
    """DeBERTa's: far places share one of a logarithm, looked up."""

    def __init__(self, count: int = 16, most: int = 512, farthest: int = 512) -> None:
        super().__init__()
        away = torch.arange(most)
        far = torch.log(away.clamp(min=1) / count) / math.log((farthest - 1) / count) * (count - 1)
        self.register_buffer("lut", torch.where(away <= count, away, torch.ceil(far).long() + count))
        self.weights = nn.Embedding(2 * count, 4)

    def forward(self, away: torch.Tensor) -> torch.Tensor:
        return self.weights(self.lut[away])


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_places_that_a_low_default_dtype_has_moved_are_damage(low: torch.dtype) -> None:
    assert safe_rope.audit(nn.Sequential(LogPlaces().to(low))).ok
    with default_dtype(low):
        model = nn.Sequential(LogPlaces())
    is_moved = not torch.equal(model[0].lut, LogPlaces().lut)
    found = [(one.what, one.severity, one.where) for one in safe_rope.audit(model.float()).findings]
    assert found == [("lut", "damaged", "constructor")] * is_moved
    assert is_moved or low is not torch.bfloat16


class GridPlaces(nn.Module):
    """The places of pairs, counted in floating numbers, in an attribute."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        steps = torch.linspace(0, width - 1, width)
        across, down = torch.stack(torch.meshgrid(steps, steps, indexing="ij")).flatten(1)
        self.places = ((across[:, None] - across) * (2 * width - 1) + down[:, None] - down).long()
        self.biases = nn.Embedding((2 * width - 1) ** 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.biases(self.places[: x.shape[1]] - int(self.places.min()))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [LogPlaces, GridPlaces])
@pytest.mark.parametrize("how", ["guard", "protect"])
def test_places_that_a_low_default_dtype_has_moved_are_moved_back(
    low: torch.dtype, make: type[nn.Module], how: str
) -> None:
    with safe_rope.guard() if how == "guard" else contextlib.nullcontext(), default_dtype(low):
        model = nn.Sequential(make())
    if how == "protect":
        safe_rope.protect(model)
    name = "lut" if make is LogPlaces else "places"
    assert torch.equal(getattr(model[0], name), getattr(make(), name))
    assert safe_rope.audit(model).ok


def test_places_that_somebody_has_put_there_stay() -> None:
    with default_dtype(torch.bfloat16):
        model = LogPlaces()
    own = model.lut = model.lut.flip(0)
    safe_rope.protect(model)
    assert model.lut is own


@pytest.mark.parametrize("style", [Relative, LogPlaces])
def test_an_average_of_integers_is_not_ok(style: type[nn.Module]) -> None:
    """torch truncates 0.9 * 7 + 0.1 * 7 to 6."""
    model = nn.Sequential(style())
    averaged = AveragedModel(model, avg_fn=lambda mean, new, _: 0.9 * mean + 0.1 * new, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(model)
    (name,) = dict(model[0].named_buffers())
    off = averaged.module[0].get_buffer(name) - model[0].get_buffer(name)
    assert 0 < int((off != 0).sum()) < off.numel()
    assert safe_rope.audit(model).ok
    (finding,) = safe_rope.audit(averaged).findings
    assert (finding.path, finding.what, finding.severity) == ("module.0", name, "unknown")


class Rolled(nn.Module):
    """Keeps nothing of how far."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(64).roll(shift), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.order]


class Groups(nn.Module):
    """A quantised layer's: which scale each channel has, whose order a file gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("g_idx", torch.arange(64) // 32)

    def forward(self, scales: torch.Tensor) -> torch.Tensor:
        return scales[self.g_idx]


def in_another_order() -> nn.Module:
    module, generator = Groups(), torch.Generator().manual_seed(0)
    module.load_state_dict({"g_idx": torch.randperm(64, generator=generator) // 32})
    return module


MADE_OTHERWISE = {
    "rolled": functools.partial(Rolled, 5),
    "farther": functools.partial(LogPlaces, most=512, farthest=530),
    "groups": in_another_order,
}


@pytest.mark.parametrize("made", MADE_OTHERWISE.values(), ids=MADE_OTHERWISE)
def test_integers_of_arguments_that_nothing_tells_are_no_finding(made: Callable[[], nn.Module]) -> None:
    module = made()
    (held,) = module.buffers()
    (usual,) = type(module)().buffers()
    assert not torch.equal(held, usual)
    assert safe_rope.audit(nn.Sequential(module)).ok


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        print("built")
        self.register_buffer("ids", torch.tensor([3, 1, 4, 1, 5]))


def test_a_constructor_that_counts_nothing_is_not_run_for_its_integers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(Listed())
    assert safe_rope.audit(model).ok
    assert capsys.readouterr().out == "built\n"


class OneFrequency(nn.Module):
    """Every pair of its channels turns alike."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.register_buffer("inv_freq", torch.full((dim // 2,), 0.37), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).repeat(1, 2)
        return self.query(x) * turned.cos()


@pytest.mark.parametrize("number", [0.0, 1.0, 0.8])
def test_another_frequency_than_the_one_that_a_constructor_makes_is_not_ok(number: float) -> None:
    module = OneFrequency()
    assert safe_rope.audit(module).ok
    module.inv_freq.fill_(number)
    assert safe_rope.audit(module).verdict == "unknown"
    assert safe_rope.audit(OneFrequency().bfloat16()).verdict == "damaged"


class Threshold(nn.Module):
    """FIRE's: what its distances are divided by is at least a number that nothing else keeps."""

    def __init__(self, width: int = 8, length: float = 500.0) -> None:
        super().__init__()
        self.mlp = nn.Linear(1, width)
        self.register_buffer("init_L", torch.tensor(length), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
        far = torch.maximum(counts, self.init_L.float())[:, None]
        apart = (counts[:, None] - counts).abs()
        return self.mlp((torch.log1p(apart) / torch.log1p(far))[..., None].to(self.mlp.weight.dtype))


@pytest.mark.parametrize("held", [math.nan, 0.0, 1e-40, math.inf])
def test_a_single_number_that_was_never_filled_is_not_ok(held: float) -> None:
    true = Threshold()
    with torch.device("meta"):
        module = Threshold()
    module.to_empty(device="cpu")
    module.load_state_dict(true.state_dict())
    module.init_L.fill_(held)
    x = torch.zeros(1, ROWS, 1)
    assert not torch.allclose(module(x), true(x), atol=1e-2)
    assert safe_rope.audit(module).verdict == "unknown"


@pytest.mark.parametrize("given", [500.0, 64.0, -1.0])
def test_a_single_number_that_a_constructor_was_given_is_left_alone(given: float) -> None:
    assert safe_rope.audit(Threshold(length=given)).ok
    assert safe_rope.audit(Threshold(length=given).bfloat16()).ok
