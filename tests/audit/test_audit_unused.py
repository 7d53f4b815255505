"""Frequencies whose dtype alone a forward reads do no damage; what anything reads does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import safe_rope

DIM, LENGTH = 32, 1500


class AsksForTheDtype(nn.Module):
    """ChatGLM's: frequencies are made anew from the dtype of those that are kept."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))
        self.dim = dim

    def made(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        theta = 1.0 / (10000 ** (torch.arange(0, self.dim, 2, dtype=dtype) / self.dim))
        phases = torch.outer(torch.arange(length, dtype=dtype), theta).float()
        return torch.stack((phases.cos(), phases.sin()), dim=-1).to(dtype)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        return self.made(max_seq_len, self.inv_freq.dtype)


class ReadsThemToo(AsksForTheDtype):
    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        return self.made(max_seq_len, self.inv_freq.dtype) * (1 + 0 * self.inv_freq[:, None])


class TurnedBeside(AsksForTheDtype):
    def phases(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length), self.inv_freq)


class Parent(nn.Module):
    """It reads what its child's forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = AsksForTheDtype(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]), self.rotary.inv_freq).cos()


class Further(nn.Module):
    """What stands in between does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"block": Holder()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.shape[1]), self.inner["block"].rotary.inv_freq).cos()


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = AsksForTheDtype(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotary(x.shape[1])


def test_frequencies_of_which_only_the_dtype_is_read_are_a_note() -> None:
    true = AsksForTheDtype(DIM)(LENGTH)
    rotary = AsksForTheDtype(DIM).bfloat16().float()
    assert torch.equal(rotary(LENGTH), true)
    report = safe_rope.audit(nn.Sequential(rotary))
    assert report.ok, str(report)
    assert [(found.what, found.severity) for found in report.findings] == [("inv_freq", "note")]
    assert safe_rope.audit(Holder().bfloat16().float()).ok
    low = AsksForTheDtype(DIM).bfloat16()
    assert (low(LENGTH).float() - true).abs().max() > 1
    assert safe_rope.audit(nn.Sequential(low)).verdict == "damaged"


@pytest.mark.parametrize("make", [lambda: ReadsThemToo(DIM), lambda: TurnedBeside(DIM), Parent, Further])
def test_what_is_read_is_damaged(make: Callable[[], nn.Module]) -> None:
    assert safe_rope.audit(nn.Sequential(make())).ok
    report = safe_rope.audit(nn.Sequential(make().bfloat16().float()))
    assert report.verdict == "damaged", str(report)


@pytest.mark.parametrize("alibi", [True, False])
def test_a_rotary_module_beside_alibi_does_no_damage(alibi: bool) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    sizes: dict[str, int] = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    torch.manual_seed(0)
    model = FalconForCausalLM(FalconConfig(**sizes, alibi=alibi)).eval().to(torch.bfloat16)
    tables = [(module, name, table) for module in model.modules() for name, table in module._buffers.items()]
    ids = torch.arange(50)[None]
    with torch.no_grad():
        cast = model(ids).logits
        verdict = safe_rope.audit(model)
        for module, name, table in tables:
            if table is not None and "inv_freq" in name:
                module._buffers[name] = torch.zeros_like(table)
        without = model(ids).logits
    assert torch.equal(cast, without) == alibi
    assert verdict.ok == alibi
    assert ("ALiBi" in str(verdict)) == alibi


class Sinusoids(nn.Embedding):
    """As Marian's: its own code asks for the weight's device, and that of nn.Embedding reads it."""

    def __init__(self, length: int = 64, dim: int = 32) -> None:
        super().__init__(length, dim)
        phase = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.weight = nn.Parameter(torch.cat((phase.sin(), phase.cos()), -1), requires_grad=False)

    def forward(self, length: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.arange(length, device=self.weight.device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_that_torch_reads_is_no_mere_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(Sinusoids())
    assert safe_rope.audit(model).ok
    assert not safe_rope.audit(model.to(dtype).float()).ok


def test_an_empty_weight_that_torch_reads_is_told() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Sinusoids())
    model.to_empty(device="cpu")
    nn.init.constant_(model[0].weight, torch.nan)  # type: ignore[arg-type]
    assert not safe_rope.audit(model).ok


class TurnsInFp32(nn.Module):
    """Turns what it gets itself; frequencies that are not FP32 any more are made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", self.made(), persistent=False)

    def made(self) -> torch.Tensor:
        return 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates = self.made() if self.rates.dtype != torch.float32 else self.rates
        phases = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), rates)
        cos, sin = phases.cos().to(x.dtype), phases.sin().to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class TurnsByWhatItHas(TurnsInFp32):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phases = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.rates)
        left, right = x.chunk(2, -1)
        return torch.cat((left * phases.cos() - right * phases.sin(), right * phases.cos()), -1)


class WidensThem(TurnsInFp32):
    """As flash-attn's did once: the frequencies stay as rounded as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates = self.rates.to(torch.float32) if self.rates.dtype != torch.float32 else self.rates
        phases = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), rates)
        left, right = x.chunk(2, -1)
        return torch.cat((left * phases.cos() - right * phases.sin(), right * phases.cos()), -1)


class CallsThemFloats(TurnsInFp32):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates = self.rates
        if self.rates.dtype is not torch.float32:
            rates = self.rates.float()
        phases = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), rates)
        left, right = x.chunk(2, -1)
        return torch.cat((left * phases.cos() - right * phases.sin(), right * phases.cos()), -1)


def test_frequencies_that_are_made_anew_unless_they_are_fp32_are_not_said_to_do_harm() -> None:
    made = nn.Sequential(nn.Linear(DIM, DIM), TurnsInFp32())
    x = torch.randn(1, LENGTH, DIM).bfloat16()
    true = made[1](x.float())
    low = made.to(torch.bfloat16)
    assert (low[1](x).float() - true).abs().max() < 0.05  # roundings of the result

    report = safe_rope.audit(low)
    assert [one.severity for one in report.findings] == ["unknown"], str(report)

    widened = low.float()  # its frequencies pass for FP32 ones now
    assert (widened[1](x.float()) - true).abs().max() > 0.5
    assert [one.severity for one in safe_rope.audit(widened).findings] == ["damaged"]


@pytest.mark.parametrize("kind", [TurnsByWhatItHas, WidensThem, CallsThemFloats])
def test_frequencies_that_a_forward_which_turns_uses_as_they_are_do_harm(kind: type[nn.Module]) -> None:
    report = safe_rope.audit(nn.Sequential(nn.Linear(DIM, DIM), kind()).to(torch.bfloat16))
    assert [one.severity for one in report.findings if one.what == "rates"] == ["damaged"], str(report)


class ChatGLM(AsksForTheDtype):
    """As its later releases: right, and rounded last."""

    def made(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return super().made(length, torch.float32).to(dtype)


def sines(rows: int) -> torch.Tensor:
    phases = torch.outer(torch.arange(rows).float(), 10000.0 ** (-torch.arange(DIM // 2).float() / 16))
    return torch.cat((phases.sin(), phases.cos()), -1)


class CastsItsTableLast(nn.Module):
    """As fairseq's: a tensor that no cast reaches has the dtype of a buffer from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = sines(LENGTH)
        self.register_buffer("_float_tensor", torch.zeros(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weights = self.weights.to(self._float_tensor)
        return self.weights[: input.shape[1]]


class GrowsInItsInputsDtype(nn.Module):
    """As Baichuan's: what a longer sequence makes is cast last."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 16
        self.table = sines(self.rows)

    def forward(self, x: torch.Tensor, seq_len: int) -> torch.Tensor:
        if seq_len > self.rows:
            self.rows = seq_len
            self.table = sines(seq_len).to(x.dtype)
        return self.table[:seq_len].to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (functools.partial(ChatGLM, DIM), (LENGTH,)),
        (CastsItsTableLast, (torch.zeros(1, LENGTH),)),
        (GrowsInItsInputsDtype, (torch.zeros(1, dtype=torch.bfloat16), LENGTH)),
    ],
)
@pytest.mark.parametrize("has_run", [False, True])
def test_what_is_right_until_a_forward_rounds_it_last_is_not_said_to_do_harm(
    kind: Callable[[], nn.Module], arguments: tuple[object, ...], has_run: bool
) -> None:
    module = kind()
    true = copy.deepcopy(module)(
        *(one.float() if isinstance(one, torch.Tensor) else one for one in arguments)
    )
    module.to(torch.bfloat16)
    if has_run:
        module(*arguments)
    report = safe_rope.audit(nn.Sequential(nn.Linear(DIM, DIM, dtype=torch.bfloat16), module))
    assert (module(*arguments).float() - true).abs().max() <= 2.0**-8
    assert "damaged" not in {one.severity for one in report.findings}, str(report)


class CastsWhatItTurns(nn.Module):
    """Rounds, where a buffer is of 16 bits, frequencies or phases that it takes sines of afterwards."""

    def __init__(self, has_phases: bool) -> None:
        super().__init__()
        rates = 10000.0 ** (-torch.arange(DIM // 2).float() / (DIM // 2))
        self.rates = torch.outer(torch.arange(LENGTH).float(), rates) if has_phases else rates
        self.has_phases = has_phases
        self.register_buffer("_float_tensor", torch.zeros(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.rates = self.rates.to(self._float_tensor)
        phases = self.rates.float()
        if not self.has_phases:
            phases = torch.outer(torch.arange(input.shape[1]).float(), phases)
        return torch.cat((phases.sin(), phases.cos()), -1)


@pytest.mark.parametrize("has_phases", [False, True])
def test_frequencies_and_phases_that_a_forward_rounds_and_turns_do_harm(has_phases: bool) -> None:
    module, given = CastsWhatItTurns(has_phases), torch.zeros(1, LENGTH)
    true = copy.deepcopy(module)(given)
    module.to(torch.bfloat16)
    assert (module(given) - true).abs().max() > 0.1
    assert safe_rope.audit(nn.Sequential(nn.Linear(DIM, DIM), module)).verdict == "damaged"


class PutsAnother(AsksForTheDtype):
    """Qwen's first: frequencies are put anew whenever a longer table is made of them."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.cached, self.tables = 0, None

    def forward(self, max_seq_len: int) -> torch.Tensor:
        if max_seq_len > self.cached:
            steps = torch.arange(0, self.dim, 2, device=self.inv_freq.device).float()
            self.inv_freq = 1.0 / 10000 ** (steps / self.dim)
            phases = torch.outer(torch.arange(max_seq_len).type_as(self.inv_freq), self.inv_freq)
            self.cached, self.tables = max_seq_len, torch.stack((phases.cos(), phases.sin()), -1)
        return self.tables[:max_seq_len]


class PutsAnotherIfLonger(PutsAnother):
    """What a short sequence is turned by is the buffer as it is."""

    def forward(self, max_seq_len: int) -> torch.Tensor:
        if max_seq_len > 2 * LENGTH:
            self.inv_freq = 1.0 / 10000 ** (torch.arange(0, self.dim, 2).float() / self.dim)
        phases = torch.outer(torch.arange(max_seq_len).float(), self.inv_freq.float())
        return torch.stack((phases.cos(), phases.sin()), -1)


class MovesItsOwn(PutsAnother):
    def forward(self, max_seq_len: int) -> torch.Tensor:
        self.inv_freq = self.inv_freq.to("cpu")
        phases = torch.outer(torch.arange(max_seq_len).float(), self.inv_freq.float())
        return torch.stack((phases.cos(), phases.sin()), -1)


@pytest.mark.parametrize(
    ("style", "severity"),
    [(PutsAnother, "unknown"), (PutsAnotherIfLonger, "damaged"), (MovesItsOwn, "damaged")],
)
def test_frequencies_that_a_forward_puts_anew_before_it_reads_them(
    style: type[PutsAnother], severity: str
) -> None:
    true, module = style(DIM)(LENGTH), style(DIM).bfloat16()
    (finding,) = safe_rope.audit(nn.Sequential(module)).findings
    assert (finding.what, finding.severity) == ("inv_freq", severity)
    assert torch.equal(module(LENGTH), true) == (severity == "unknown")


class StaysComplex(nn.Module):
    def __init__(self, dim: int = DIM, length: int = 64) -> None:
        super().__init__()
        speeds = 10000.0 ** -(torch.arange(0, dim, 2).float() / dim)
        phases = torch.outer(torch.arange(length).float(), speeds)
        self.register_buffer("held", torch.polar(torch.ones_like(phases), phases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.held[: x.shape[1]]).flatten(-2)


class RealLater(StaysComplex):
    """Its forward needs the real part of its phasors alone, and keeps no more of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.held.is_complex():
            self.held = self.held.real.clone()
        return x * self.held[: x.shape[1]]


class RealLaterInAMethod(RealLater):
    def reduce(self) -> None:
        self.held = self.held.real.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.held.real[: x.shape[1]]


def test_a_real_part_that_a_class_itself_has_taken_is_no_damage() -> None:
    called, reduced = RealLater(), RealLaterInAMethod()
    x = torch.ones(1, 8, DIM // 2)
    assert torch.equal(called(x), RealLater()(x))
    reduced.reduce()
    for module in (called, reduced):
        (finding,) = safe_rope.audit(nn.Sequential(module)).findings
        assert (finding.what, finding.severity) == ("held", "unknown")


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_an_imaginary_part_that_a_cast_has_left_behind_is_damage() -> None:
    low = (style().to(torch.bfloat16) for style in (StaysComplex, RealLaterInAMethod))
    for module in (*low, StaysComplex().to(torch.float32)):
        assert [one.severity for one in safe_rope.audit(nn.Sequential(module)).findings] == ["damaged"]


class KeepsCachesOfOld(nn.Module):
    """Llama's of transformers 4.38: tables under private names, for code that asks a property for them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.dim, self.base, self.max_position_embeddings = DIM, 10000, LENGTH
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, DIM, 2).float() / DIM)))
        phases = torch.outer(torch.arange(LENGTH).float(), self.inv_freq).repeat(1, 2)
        self.max_seq_len_cached = LENGTH
        self.register_buffer(f"{name}cos_cached", phases.cos().to(torch.get_default_dtype()))
        self.register_buffer(f"{name}sin_cached", phases.sin().to(torch.get_default_dtype()))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = (position_ids[..., None].float() * self.inv_freq.float()).repeat(1, 1, 2)
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


@pytest.mark.parametrize(("name", "verdict"), [("_", "ok"), ("", "damaged")])
def test_caches_by_private_names_that_a_forward_does_not_read_are_a_note(name: str, verdict: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = nn.ModuleDict({"rotary": KeepsCachesOfOld(name)})
    finally:
        torch.set_default_dtype(torch.float32)
    report = safe_rope.audit(model)
    assert report.modules[0].verdict == verdict
    if verdict == "ok":
        assert any("forward does not use them" in finding.source for finding in report.findings)


class KeepsPairsUnread(nn.Module):
    """Its forward computes; the tables in the dict are there for nobody, unless ``Reads`` says so."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        phases = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
        self.tables = {"plain": {"cos": phases.cos(), "sin": phases.sin()}}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq = 10000.0 ** -(torch.arange(0, self.dim, 2) / self.dim)
        phases = position_ids[..., None].float() * torch.cat((inv_freq, inv_freq))
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


class ReadsPairs(KeepsPairsUnread):
    def cosines(self) -> torch.Tensor:
        return self.tables["plain"]["cos"]


class ReadsPairsInBF16(KeepsPairsUnread):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(x, position_ids)
        if x.dtype != torch.bfloat16:
            return cos, sin
        read = self.tables["plain"]["cos"][position_ids.clamp(max=LENGTH - 1)]
        return torch.cat((read, read), -1).to(x.dtype), sin


@pytest.mark.parametrize(
    ("kind", "verdict"), [(KeepsPairsUnread, "ok"), (ReadsPairs, "damaged"), (ReadsPairsInBF16, "damaged")]
)
@pytest.mark.parametrize("empty", [False, True])
def test_pairs_in_a_dict_do_harm_where_something_reads_them(
    kind: type[KeepsPairsUnread], verdict: str, empty: bool
) -> None:
    module = kind()
    assert safe_rope.audit(module).ok
    for name, table in module.tables["plain"].items():
        module.tables["plain"][name] = torch.zeros_like(table) if empty else table.bfloat16().float()
    report = safe_rope.audit(module)
    assert report.verdict == verdict, str(report)
    assert {one.what for one in report.findings} == {"tables.plain.cos", "tables.plain.sin"}
    assert not any(table.isnan().any() for table in module.tables["plain"].values())
