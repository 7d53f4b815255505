"""Tables that nothing here can keep or read: they are named, and stop neither the guard nor the audit."""

from __future__ import annotations

import pytest
import torch
from support.zero_init import zero_init
from torch import nn
from torch.nn.utils import parametrize

import safe_rope
from safe_rope.errors import PrecisionWarning


def frequencies() -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32)


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).cos().to(x.dtype)


class Unchanged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("while_open", [True, False])
def test_a_protected_table_that_is_parametrized_afterwards_is_named(while_open: bool) -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(Rope())
        if while_open:
            model.train()
            parametrize.register_parametrization(model[0], "inv_freq", Unchanged())
    if while_open:
        assert any("inv_freq" in str(entry) for entry in session.report.left)
    else:
        parametrize.register_parametrization(model[0], "inv_freq", Unchanged())
    assert safe_rope.audit(model).verdict == "ok"
    model.to(torch.bfloat16)
    assert safe_rope.audit(model).verdict == "damaged"
    assert any("inv_freq" in str(entry) for entry in safe_rope.protect(model).left)


class Unreadable(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        table = torch.outer(torch.arange(16).float(), frequencies()).sin()
        if kind == "sparse":
            table = table.to_sparse()
        elif kind == "8 bits":
            table = table.to(torch.float8_e4m3fn)
        self.register_buffer("sin_table", table, persistent=False)


@pytest.mark.parametrize("kind", ["sparse", "8 bits"])
def test_a_table_that_torch_cannot_compare_is_named(kind: str) -> None:
    with pytest.warns(PrecisionWarning, match="sin_table"), safe_rope.guard():
        model = nn.Sequential(Unreadable(kind), Rope())
    report = safe_rope.audit(model)
    assert report.verdict == "unknown"
    assert [finding.what for finding in report.findings if finding.severity == "unknown"] == ["sin_table"]


class Buffers(nn.Module):
    def __init__(self, *tables: torch.Tensor) -> None:
        super().__init__()
        for index, table in enumerate(tables):
            self.register_buffer(str(index), table, persistent=False)


class Model(nn.Module):
    def __init__(self, *tables: torch.Tensor) -> None:
        super().__init__()
        self.tables = Buffers(*(tables or (frequencies().cos(), frequencies().sin())))


def test_tables_that_a_constructor_was_given_on_meta_are_named() -> None:
    session = safe_rope.guard().start()
    with torch.device("meta"):
        model = Model(frequencies().cos(), frequencies().sin())
    model.to_empty(device="cpu")
    with pytest.warns(PrecisionWarning, match=r"tables.*Buffers"):
        session.stop()


def test_tables_that_a_constructor_got_from_its_owner_come_back_from_meta() -> None:
    with safe_rope.guard():
        with torch.device("meta"):
            model = Model()
        model.to_empty(device="cpu")
    assert torch.equal(model.tables._buffers["0"], frequencies().cos())
    assert torch.equal(model.tables._buffers["1"], frequencies().sin())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies())
        self.lin = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), self.inv_freq)
        return self.lin(phase.sin().to(self.lin.weight.dtype))


class CountingAndRaising(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(x.shape[1], dtype=x.dtype).float()
        phase = torch.matmul(counts.view(-1, 1), self.inv_freq.view(1, -1))
        return self.lin(phase.sin().to(self.lin.weight.dtype))


@pytest.mark.parametrize("cls", [Counting, CountingAndRaising])
@pytest.mark.parametrize("cast", [True, False])
def test_positions_counted_in_low_precision_beside_weights_are_told_once_they_are_too_many(
    recwarn: pytest.WarningsRecorder, cls: type[nn.Module], cast: bool
) -> None:
    with safe_rope.guard():
        model = cls()
    if cast:
        model.to(torch.bfloat16)
    said: list[int] = []
    for length in (100, 120, 300, 700):
        model(torch.zeros(1, length, 16, dtype=torch.bfloat16))
        said.append(sum("positions counted in torch.bfloat16" in str(w.message) for w in recwarn))
    assert said == [0, 0, 1, 1]


class OnceOnly(Rope):
    """Neither of its methods can begin again inside of itself."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        table = self._buffers.pop("inv_freq")
        super()._apply(fn, recurse)
        self._buffers["inv_freq"] = table
        return self

    def load_state_dict(self, state_dict, *args, **kwargs):  # type: ignore[no-untyped-def]
        state_dict.pop("extra")
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_a_method_of_a_class_is_not_run_inside_of_itself_while_a_guard_is_open() -> None:
    for use in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m._apply(lambda t: t.double()),
        lambda m: m.load_state_dict({"extra": torch.zeros(1)}),
    ):
        with safe_rope.guard():
            module = OnceOnly()
            use(module)
        assert torch.equal(module.inv_freq, frequencies())


class FilledByItsParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).cos().to(x.dtype)


def test_what_its_constructor_does_not_make_is_not_blamed_on_arguments() -> None:
    model = nn.Sequential(FilledByItsParent())
    model[0].inv_freq = frequencies()
    model.to(torch.bfloat16)
    with pytest.warns(PrecisionWarning, match="its constructor does not make it"):
        report = safe_rope.protect(model)
    assert "arguments" not in str(report)
    assert "arguments" not in str(safe_rope.audit(model))


class SetUp(type(nn.Module)):  # type: ignore[misc]
    """Fills an instance that no constructor has filled."""

    def __call__(cls, *args: object) -> nn.Module:
        module: nn.Module = super().__call__(*args)
        module.register_buffer("inv_freq", frequencies())
        return module


class SetUpByItsClass(nn.Module, metaclass=SetUp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq.float()).cos().to(x.dtype)


@pytest.mark.parametrize("assign", [True, False])
def test_a_class_without_a_constructor_is_kept_on_meta(assign: bool) -> None:
    state = SetUpByItsClass().state_dict()
    with safe_rope.guard() as session, torch.device("meta"):
        model = SetUpByItsClass()
    model = model if assign else model.to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    model.to(torch.bfloat16)
    assert not session.report.unprotected
    assert torch.equal(model._buffers["inv_freq"], frequencies())


class RandomFrequencies(Rope):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.randn(16).abs(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.outer(torch.arange(x.shape[1]), self.inv_freq).sin()


def test_random_frequencies_are_named_and_unknown_once_they_are_rounded() -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(RandomFrequencies())
    assert any("inv_freq is nothing that its" in str(entry) for entry in session.report.left)
    assert safe_rope.audit(model).ok
    assert safe_rope.audit(model.to(torch.bfloat16)).verdict == "unknown"


def _sinusoids(rows: int, width: int, *, halves: bool = False) -> torch.Tensor:
    phase = torch.outer(
        torch.arange(rows).float(), 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
    )
    both = (phase.sin(), phase.cos())
    return torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2)


class OfWeekdays(nn.Module):
    """Informer's: a frozen Embedding of sines, with a row for each day or quarter of an hour."""

    def __init__(self, rows: int, halves: bool) -> None:
        super().__init__()
        self.rows, self.halves = rows, halves
        self.emb = _frozen_embedding(_sinusoids(rows, 64, halves=halves))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(x)


def _frozen_embedding(rows: torch.Tensor) -> nn.Embedding:
    embedding = nn.Embedding(*rows.shape)
    embedding.weight = nn.Parameter(rows, requires_grad=False)
    return embedding


@pytest.mark.parametrize("rows", [4, 7, 8, 13])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_embedding_of_few_sines_is_named(rows: int, halves: bool, dtype: torch.dtype) -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(OfWeekdays(rows, halves).to(dtype))
    for report in (session.report, safe_rope.protect(model)):
        assert ["emb.weight" in str(entry) for entry in report.left] == [True]
    assert safe_rope.audit(model).ok


def _few_rows() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    drawn, steps = torch.randn(7, 64, generator=draw), torch.arange(7.0)[:, None]
    hadamard = torch.tensor([[1.0, 1], [1, -1]])
    return {
        "words": drawn,
        "words behind rows of zeros": torch.cat((torch.zeros(200, 64), drawn)),
        "words as they are drawn first": 0.02 * drawn,
        "unit words": drawn / drawn.norm(dim=-1, keepdim=True),
        "words of the norm of sines": drawn / drawn.norm(dim=-1, keepdim=True) * 32**0.5,
        "one of each": torch.eye(7, 16),
        "bits": torch.tensor([[(row >> bit) & 1 for bit in range(8)] for row in range(7)]).float(),
        "straight lines": steps * torch.linspace(-1, 1, 16),
        "orthonormal": torch.linalg.qr(torch.randn(16, 16, generator=draw))[0][:7],
        "Hadamard's": torch.kron(torch.kron(hadamard, hadamard), hadamard)[:7] / 8**0.5,
        "constant": torch.full((7, 16), 0.5**0.5),
        "cosines alone": torch.cos(torch.outer(torch.arange(5.0), torch.arange(7.0))),
    }


class OfOthers(OfWeekdays):
    def __init__(self, kind: str) -> None:
        nn.Module.__init__(self)
        self.kind = kind
        self.emb = _frozen_embedding(_few_rows()[kind])


@pytest.mark.parametrize("kind", [*_few_rows()])
def test_a_frozen_embedding_of_few_other_rows_is_none_of_positions(kind: str) -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(OfOthers(kind))
    for report in (session.report, safe_rope.protect(model)):
        assert not report.left
    assert safe_rope.audit(model.to(torch.bfloat16)).ok


class Phases(nn.Module):
    """Keeps nothing of what it was built with, and takes no sines of what it holds."""

    def __init__(self, name: str, base: float, width: int) -> None:
        super().__init__()
        phases = torch.arange(640)[:, None] * base ** (-torch.arange(0, width, 2) / width)
        self.register_buffer(name, phases, persistent=False)

    def forward(self) -> torch.Tensor:
        return next(self.buffers())


class TakesTheSines(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.held = Phases(name, 1e4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held()[: x.shape[1]].sin().to(x.dtype)


@pytest.mark.parametrize("name", ["t", "angles", "phases", "theta", "omega"])
def test_phases_that_another_module_takes_sines_of_are_named(name: str) -> None:
    x = torch.zeros(1, 600, 8)
    true = TakesTheSines(name)(x)
    damaged = TakesTheSines(name).to(torch.bfloat16)
    assert not safe_rope.audit(damaged).ok
    with pytest.warns(PrecisionWarning, match=f"{name}: its constructor cannot be run again"):
        safe_rope.protect(damaged)
    assert not safe_rope.audit(damaged).ok
    model = TakesTheSines(name)
    safe_rope.protect(model)
    made = model.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert torch.equal(made, true.to(torch.bfloat16))


@pytest.mark.parametrize("held", ["images", "ramps", "one row"])
def test_other_numbers_are_no_phases(held: str) -> None:
    numbers = {
        "images": torch.rand(64, 8, generator=torch.Generator().manual_seed(0)),
        "ramps": torch.arange(64.0)[:, None].expand(64, 8).contiguous(),
        "one row": torch.arange(1.0, 9.0)[None],
    }

    class Holds(nn.Module):
        def __init__(self, given: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("held", given.clone())

    model = nn.Sequential(Holds(numbers[held])).to(torch.bfloat16)
    assert safe_rope.audit(model).ok
    assert not safe_rope.protect(model).unprotected


class FourierEmbedding(nn.Module):
    """AlphaFold 3's, as Boltz writes it: cosines of what a frozen linear layer makes of noise levels."""

    def __init__(self, dim: int, is_frozen: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(1, dim)
        nn.init.normal_(self.proj.weight, mean=0, std=1)
        nn.init.normal_(self.proj.bias, mean=0, std=1)
        self.proj.requires_grad_(not is_frozen)
        self.out = nn.Linear(dim, dim)
        self.out.requires_grad_(False)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        turned = self.proj(times[:, None])
        return self.out(torch.cos(2 * torch.pi * turned))


@pytest.mark.contract
def test_random_frequencies_in_a_frozen_linear_layer_are_named_and_unknown_once_rounded() -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(FourierEmbedding(16))
    assert [entry.path for entry in session.report.left] == ["0", "0"]
    assert {"proj.weight", "proj.bias"} == {entry.reason.split()[0] for entry in session.report.left}
    assert safe_rope.audit(model).ok
    model.to(torch.bfloat16)
    report = safe_rope.audit(model)
    assert report.verdict == "unknown"
    assert {finding.what for finding in report.findings} == {"proj.weight", "proj.bias"}
    assert len(safe_rope.protect(model).left) == 2


@pytest.mark.contract
@pytest.mark.usefixtures("deepspeed_group")
def test_random_frequencies_that_zero_init_has_partitioned_are_named_and_unknown() -> None:
    with safe_rope.guard() as session, zero_init():
        model = nn.Sequential(FourierEmbedding(16))
    assert {"proj.weight", "proj.bias"} == {entry.reason.split()[0] for entry in session.report.left}
    assert {finding.what for finding in safe_rope.audit(model).findings} == {"proj.weight", "proj.bias"}


def test_a_linear_layer_that_is_trained_is_not_named() -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(FourierEmbedding(16, is_frozen=False))
    assert not session.report.left
    assert safe_rope.audit(model.to(torch.bfloat16)).ok


class TimeEncode(nn.Module):
    """TGN's: cosines of times by frequencies in a frozen linear layer, with a bias of zeros."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Linear(1, dim)
        self.w.weight = nn.Parameter((1 / 10 ** torch.linspace(0, 9, dim)).reshape(dim, -1))
        self.w.bias = nn.Parameter(torch.zeros(dim))
        self.requires_grad_(False)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        return torch.cos(self.w(times[:, None]))


@pytest.mark.contract
def test_frequencies_in_a_frozen_linear_layer_are_told_once_and_zeros_are_not() -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(TimeEncode(32))
    assert [(entry.path, entry.reason.split()[0]) for entry in session.report.left] == [("0", "w.weight")]
    assert safe_rope.audit(model).ok
    report = safe_rope.audit(model.to(torch.bfloat16))
    assert [(finding.what, finding.severity) for finding in report.findings] == [("w.weight", "damaged")]


class Waves(nn.Module):
    def __init__(self, rows: int = 600, width: int = 16) -> None:
        super().__init__()
        phases = torch.arange(rows)[:, None] * 10000 ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("waves", torch.stack((phases.sin(), phases.cos()), -1).flatten(1)[None])


class Copied(nn.Module):
    """Keeps the waves of a module that it makes for them alone, under a name that says nothing."""

    def __init__(self, in_embedding: bool) -> None:
        super().__init__()
        waves = Waves().waves[0]
        self.at = nn.Embedding.from_pretrained(waves) if in_embedding else nn.Parameter(waves, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        return x + (self.at(places) if isinstance(self.at, nn.Embedding) else self.at[places])


@pytest.mark.contract
@pytest.mark.parametrize("in_embedding", [True, False])
def test_frozen_sines_of_a_module_that_is_gone_are_named(in_embedding: bool) -> None:
    with safe_rope.guard() as session:
        model = nn.Sequential(nn.Linear(16, 16).requires_grad_(False), Copied(in_embedding))
    name = "at.weight" if in_embedding else "at"
    assert [(entry.path, entry.reason.split()[0]) for entry in session.report.left] == [("1", name)]
    assert safe_rope.audit(model).ok
    named = [finding.what for finding in safe_rope.audit(model.to(torch.bfloat16)).findings]
    assert named == [name]
