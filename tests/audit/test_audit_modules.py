"""audit() measures rotary classes that no patch covers, and those of several layer types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from audited import LowForward, PlainRotary, of
from torch import nn

import safe_rope
from safe_rope._audit.command.dump import load
from safe_rope.errors import PrecisionWarning, UnsupportedModelError


def test_a_class_that_no_patch_covers_is_measured() -> None:
    report = safe_rope.audit(nn.ModuleDict({"a": PlainRotary(), "b": PlainRotary()}))
    assert report.ok, str(report)
    assert [m.path for m in report.modules] == ["a", "b"]
    assert len(report.modules[0].rows) == 10


@pytest.mark.parametrize(("low", "first"), [(torch.bfloat16, 257), (torch.float16, 2049)], ids=str)
def test_collapsed_positions_are_recognised(low: torch.dtype, first: int) -> None:
    report = safe_rope.audit(PlainRotary(position_dtype=low))
    (cache,) = of(report, "cos_cached, sin_cached")
    name = str(low).removeprefix("torch.")
    assert f"built from positions rounded to {name}" in cache.source
    assert cache.first_damaged_position == cache.first_bad_position == first
    assert cache.phase_error_rad > 0.9
    assert of(report, "forward")[0].first_bad_position == first


def test_a_forward_of_low_precision_is_recognised() -> None:
    report = safe_rope.audit(LowForward())
    (forward,) = of(report, "forward")
    assert "computed in bfloat16" in forward.source
    assert not of(report, "inv_freq")


class ComplexRotary(PlainRotary):
    """One complex number for a pair, as Llama 4 and DeepSeek-V2 have it."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        phases = position_ids[..., None].float() * self.inv_freq.float()
        return torch.polar(torch.ones_like(phases), phases)


def test_complex_tables_are_measured() -> None:
    report = safe_rope.audit(ComplexRotary())
    assert report.ok, str(report)
    assert report.modules[0].worst.phase_error_rad > 1e-7
    damaged = safe_rope.audit(ComplexRotary().bfloat16())
    assert of(damaged, "forward")[0].first_bad_position == of(damaged, "inv_freq")[0].first_bad_position


class OrderedRotary(PlainRotary):
    """The channels of two axes in turn, then those of the third, as Ernie 4.5 VL has them."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].float() * self.inv_freq.float()
        half = phases.shape[-1] // 2
        order = torch.cat((torch.arange(0, half, 2), torch.arange(1, half, 2), torch.arange(half, 2 * half)))
        turned = phases[..., order].repeat_interleave(2, dim=-1)
        return turned.cos(), turned.sin()


@pytest.mark.parametrize("tables", ["exact", "fp32"])
def test_a_protected_module_with_an_order_of_its_own_is_measured(tables: Any) -> None:
    with safe_rope.guard(tables=tables):
        model = nn.ModuleDict({"rotary": OrderedRotary()})
    (module,) = model.children()
    report = safe_rope.audit(model.bfloat16())
    assert report.ok, str(report)
    assert report.modules[0].protected
    assert len(report.modules[0].rows) == 10
    x, positions = torch.zeros(1, 4, 8), torch.arange(4)[None]
    for table, stock in zip(module(x, positions), OrderedRotary()(x, positions), strict=True):
        torch.testing.assert_close(table, stock, rtol=0, atol=1e-6)
    wrong = nn.ModuleDict({"rotary": OrderedRotary().bfloat16()})
    assert not safe_rope.audit(wrong).ok


class Heedless(nn.Module):
    """Takes no notice of the scaling in its config, as Nemotron does up to transformers 4.57."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rope_type, self.config = "default", config
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64)), False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = torch.cat((position_ids[..., None].float() * self.inv_freq.float(),) * 2, dim=-1)
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic"])
def test_a_module_is_measured_by_what_it_does_with_its_config(rope_type: str) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, rope_scaling={"rope_type": rope_type, "factor": 2.0})
    report = safe_rope.audit(nn.ModuleDict({"rotary": Heedless(config)}))
    assert report.ok, str(report)
    with safe_rope.guard(tables="fp32"):
        model = nn.ModuleDict({"rotary": Heedless(config)})
    report = safe_rope.audit(model.bfloat16())
    assert report.ok, str(report)
    (module,) = model.children()
    x, positions = torch.zeros(1, 200, 8), torch.arange(200)[None]
    assert all(map(torch.equal, module(x, positions), Heedless(config)(x, positions)))


class Untold(nn.Module):
    """Nobody can say what its constructor was called with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, count, 2).float() / count)))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return position_ids[..., None].float() * self.inv_freq.float()


def test_tables_of_a_constructor_that_cannot_run_again_are_unknown_not_ok() -> None:
    report = safe_rope.audit(Untold(64))
    assert not report.ok
    assert [f.severity for f in report.findings] == ["unknown"]
    assert report.findings[0].source.startswith("its constructor cannot be run again")
    report.raise_if_damaged()


def test_what_is_kept_and_cannot_be_judged_is_unknown_not_ok() -> None:
    model = Untold(64)
    with pytest.warns(PrecisionWarning, match="kept, cannot be judged"):
        safe_rope.protect(model)
    for one in (model, model.bfloat16()):
        assert safe_rope.audit(one).verdict == "unknown"


class UntoldCounting(nn.Module):
    """Only makes positions, from a table and from a count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.arange(x.shape[1])[:, None] * self.inv_freq
        return torch.cat((phase.sin(), phase.cos()), -1)


def test_what_is_named_as_not_protected_is_as_damaged_as_before() -> None:
    model = nn.Sequential(UntoldCounting(64)).bfloat16()
    before = safe_rope.audit(model)
    with pytest.warns(PrecisionWarning, match="not protected: inv_freq"):
        safe_rope.protect(model)
    after = safe_rope.audit(model)
    assert before.verdict == after.verdict == "damaged"
    assert [f.what for f in after.findings] == ["inv_freq"]


def test_an_even_grid_is_not_taken_for_rounded_frequencies() -> None:
    for values in (torch.arange(33) / 32, torch.arange(1, 65).float(), 2.0 ** -torch.arange(32)):
        model = Untold(64)
        model.inv_freq = values
        assert [f.severity for f in safe_rope.audit(model).findings] == ["unknown"]


def test_random_frequencies_in_16_bits_are_not_taken_for_damaged() -> None:
    model = Untold(64)
    model.inv_freq = torch.randn(32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert [f.severity for f in safe_rope.audit(model).findings] == ["unknown"]


def test_rounded_frequencies_are_damaged_whatever_made_them() -> None:
    for model in (Untold(64).bfloat16(), Untold(64).half().float()):
        report = safe_rope.audit(model)
        assert [f.severity for f in report.findings] == ["damaged"]
        assert "-rounded frequencies" in report.findings[0].source


def test_what_the_constructor_makes_is_right_whatever_the_attributes_say() -> None:
    rotary = PlainRotary()
    rotary.base = 5000
    assert safe_rope.audit(rotary).ok
    assert not safe_rope.audit(rotary.bfloat16()).ok


def test_a_forward_that_cannot_be_asked_is_named_and_its_tables_are_measured() -> None:
    class Picky(PlainRotary):
        def forward(self, x: torch.Tensor, seq_len: int) -> Any:
            raise RuntimeError("not like this")

    report = safe_rope.audit(Picky())
    assert report.ok
    assert "not like this" in of(report, "forward", "note")[0].source
    assert of(safe_rope.audit(Picky().bfloat16()), "inv_freq")


def test_parameters_for_each_layer_type_are_measured() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma3TextConfig"):
        pytest.skip("this transformers has no Gemma 3")
    config = transformers.Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=32,
        num_hidden_layers=6,
        vocab_size=32,
        max_position_embeddings=512,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    embeddings = {(m.path, row.layer_type) for m in report.modules for row in m.rows}
    assert len(embeddings) == 2
    layers = {name: table["layers"].tolist() for name, table in report.tables.items() if ":" in name}
    for name, numbers in layers.items():
        assert numbers == [at for at, one in enumerate(config.layer_types) if name.endswith(f":{one}")]
    damaged = safe_rope.audit(model.bfloat16())
    assert len([f for f in damaged.damaged if f.what.startswith("forward")]) == 2


@pytest.mark.parametrize("family", ["Cohere", "Cohere2"])
def test_tables_that_are_interleaved_are_judged_and_dumped_as_they_are(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_hidden_layers=1,
        vocab_size=32,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        rope_theta=10000.0,
    )
    stock = transformers.AutoModelForCausalLM.from_config(config)
    with safe_rope.guard():
        guarded = transformers.AutoModelForCausalLM.from_config(config)
    for model in (stock, guarded.bfloat16()):
        report = safe_rope.audit(model)
        assert report.ok, str(report)
        assert report.modules
        inv_freq = 10000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        for table in safe_rope.audit(model, [0, 1, 7]).tables.values():
            phases = table["positions"].double()[:, None] * inv_freq
            assert torch.allclose(table["cos"].double(), phases.cos(), atol=1e-6)
    assert {m.verdict for m in safe_rope.audit(stock.bfloat16()).modules} == {"damaged"}


def test_a_live_model_is_dumped(tmp_path: Path) -> None:
    report = safe_rope.audit(nn.ModuleDict({"a": PlainRotary(), "b": PlainRotary()}), range(64))
    file = tmp_path / "tables.safetensors"
    report.dump(file)
    groups, _ = load(file)
    assert groups.keys() == {""}
    assert groups[""].keys() == {"a", "b"}
    table = groups[""]["a"]
    assert torch.equal(table["positions"], torch.arange(64))
    assert torch.equal(table["cos"], PlainRotary().cos_cached[:64, :64])
    assert torch.equal(table["sin"], PlainRotary().sin_cached[:64, :64])
    with pytest.raises(UnsupportedModelError, match=r"no table of torch.*Linear was measured"):
        safe_rope.audit(nn.Linear(2, 2)).dump(tmp_path / "none.safetensors")
    assert list(tmp_path.iterdir()) == [file]


class FrozenUntold(nn.Module):
    """Frequencies that are a frozen parameter; nobody can say what its constructor was called with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        freqs = 1.0 / (10000 ** (torch.arange(0, count, 2).float() / count))
        self.freqs = nn.Parameter(freqs, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.arange(x.shape[1])[:, None] * self.freqs).cos()


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda model: model, "ok"),
        (lambda model: model.half().float(), "unknown"),
        (lambda model: model.bfloat16(), "damaged"),
        (lambda model: model.freqs.data.fill_(torch.nan), "damaged"),
    ],
    ids=["plain", "half and back", "bfloat16", "not a number"],
)
def test_frozen_frequencies_that_no_constructor_explains_are_judged_by_their_values(
    change: Any, verdict: str
) -> None:
    model = FrozenUntold(64)
    change(model)
    assert safe_rope.audit(model).verdict == verdict


class FrozenWithoutAName(nn.Module):
    """Frequencies that are a frozen parameter, in a list or not, and are called like anything else."""

    def __init__(self, in_a_list: bool) -> None:
        super().__init__()
        self.in_a_list = in_a_list
        table = nn.Parameter(10000.0 ** (-torch.arange(0, 32, 2).float() / 32), requires_grad=False)
        self.held = nn.ParameterList([table]) if in_a_list else table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.arange(x.shape[1])[:, None] * (self.held[0] if self.in_a_list else self.held)
        return torch.cat((phase.cos(), phase.sin()), -1)


@pytest.mark.parametrize("in_a_list", [True, False])
def test_rounded_frequencies_in_a_frozen_parameter_of_any_name_are_not_ok(in_a_list: bool) -> None:
    model = FrozenWithoutAName(in_a_list)
    assert safe_rope.audit(model).ok
    assert safe_rope.audit(model.bfloat16()).verdict == "damaged"


class Witness(nn.Module):
    """A number that nobody fills tells the dtype that the model has."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("_float_tensor", torch.FloatTensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        freqs = 10000 ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        return (torch.arange(x.shape[1])[:, None] * freqs).cos().to(self._float_tensor)


@pytest.mark.parametrize("left", [1e25, 3e-41, torch.nan])
def test_memory_that_nobody_has_filled_is_not_taken_for_a_damaged_number(left: float) -> None:
    model = Witness()
    model._float_tensor.data = torch.tensor([left])
    for one in (model, model.half().float(), model.bfloat16()):
        assert safe_rope.audit(one).verdict != "damaged"


class Base(nn.Module):
    """The base of its frequencies is a number that torch's old constructor makes."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("base", torch.FloatTensor([500_009.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        freqs = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        return (torch.arange(x.shape[1])[:, None] * freqs).cos()


def test_a_number_of_the_old_constructor_is_repaired_and_kept() -> None:
    model = Base().bfloat16()
    assert safe_rope.audit(model).verdict == "damaged"
    safe_rope.protect(model)
    assert model.base.tolist() == [500_009.0]
    x = torch.zeros(1, 9, 4)
    assert torch.equal(model(x), Base()(x).to(model(x).dtype))
    assert safe_rope.audit(model).verdict == "ok"


class NumbersOfATensor(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.dim = dim
        self.freqs = (1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)).tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = torch.outer(torch.arange(x.shape[1]).float(), torch.tensor(self.freqs))
        return torch.cat((phase.cos(), phase.sin()), -1).to(x.dtype)


def test_rounded_numbers_in_a_list_are_damaged_and_mended() -> None:
    assert safe_rope.audit(NumbersOfATensor()).ok
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        stock = NumbersOfATensor()
        with safe_rope.guard():
            guarded = NumbersOfATensor()
    finally:
        torch.set_default_dtype(before)
    assert safe_rope.audit(stock).verdict == "damaged"
    assert guarded.freqs == NumbersOfATensor().freqs
    safe_rope.protect(stock)
    assert stock.freqs == NumbersOfATensor().freqs


def test_numbers_that_somebody_has_put_there_stay() -> None:
    with safe_rope.guard():
        model = NumbersOfATensor()
        model.freqs = [0.5 * number for number in model.freqs]
    safe_rope.protect(model)
    assert model.freqs == [0.5 * number for number in NumbersOfATensor().freqs]
    assert safe_rope.audit(model).verdict != "damaged"


class Rows(nn.Module):
    """Sines of a hundred positions, of which forward takes rows; it makes them from integers."""

    def __init__(self, rows: int = 100, dim: int = 32) -> None:
        super().__init__()
        phase = torch.arange(rows)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("embed_positions", torch.cat((phase.sin(), phase.cos()), 1), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.embed_positions[position_ids].to(x.dtype).chunk(2, -1))


def test_a_forward_is_measured_as_far_as_its_table_goes() -> None:
    report = safe_rope.audit(Rows())
    assert report.ok
    assert not of(report, "forward"), "nothing is left to be said of it"
    assert [row.position for row in report.modules[0].rows] == [0, 1, 99]
    damaged = Rows()
    damaged.embed_positions = damaged.embed_positions.bfloat16().float()
    assert max(row.cos_error for row in safe_rope.audit(damaged).modules[0].rows) > 1e-3


class Words(nn.Module):
    """Two Embeddings without a telling name in a class that makes sines: one of words, one of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(64, 32), nn.Embedding(64, 32)
        phase = torch.arange(64)[:, None] / 10000 ** (torch.arange(0, 32, 2) / 32)
        self.second.weight.data = torch.cat((phase.sin(), phase.cos()), 1)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(ids) + self.second(torch.arange(ids.shape[-1]))


def test_of_frozen_embeddings_those_of_words_are_not_taken_for_positions() -> None:
    assert "first.weight" not in str(safe_rope.audit(Words()))
    left = str(safe_rope.protect(Words()))
    assert "second.weight" in left
    assert "first.weight" not in left
