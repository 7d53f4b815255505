"""audit() measures real models, says what is damaged and why, and changes nothing."""

from __future__ import annotations

import gc
import json
import math
import re
import sys
from typing import Any

import pytest
import torch
from rotary_models import FAMILIES, LENGTH, build, first_rotary, rope_types, rotary_modules
from torch import nn

import safe_rope
from safe_rope import application
from safe_rope.audit import Finding
from safe_rope.errors import ConfigError, DamagedTablesError, UnsupportedModelError
from safe_rope.recognition import read_spec
from safe_rope.registry import find

ONE_ULP = 2.0**-23
EVERY_KIND = [*((family, "default") for family in FAMILIES), *(("llama", kind) for kind in rope_types()[1:])]


def of(report: Any, what: str, severity: str = "damaged") -> list[Finding]:
    return [f for f in report.findings if f.what == what and f.severity == severity]


def has_caches(model: nn.Module) -> bool:
    return hasattr(first_rotary(model), "cos_cached")


# ------------------------------------------------ what is right


@pytest.mark.parametrize(("family", "rope_type"), EVERY_KIND)
def test_a_stock_fp32_model_is_ok(family: str, rope_type: str) -> None:
    model = build(family, rope_type)
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert not report.findings
    assert [m.path for m in report.modules] == list(rotary_modules(model))
    for module in report.modules:
        assert [row.position for row in module.rows] == [0, 1, 255, 256, 257, 2047, 2048, 2049, 4095, 8192]
        assert module.verdict == "ok"
        assert not module.protected
        assert module.worst.phase_error_rad > 1e-7, "stock FP32 is not exact, and is measured to be so"


@pytest.mark.parametrize(("family", "rope_type"), EVERY_KIND)
def test_a_guarded_model_is_exact_whatever_it_is_cast_to(family: str, rope_type: str) -> None:
    with safe_rope.guard():
        model = build(family, rope_type)
    for cast in (torch.bfloat16, torch.float16, torch.float32):
        report = safe_rope.audit(model.to(cast))
        assert report.ok, str(report)
        assert not report.findings
        for module in report.modules:
            assert module.protected
            assert module.worst.phase_error_rad <= ONE_ULP


def test_a_model_without_rotary_modules_is_ok_and_says_so() -> None:
    report = safe_rope.audit(nn.Linear(2, 2))
    assert report.ok
    assert report.modules == []
    assert "no rotary module" in str(report)
    report.raise_if_damaged()


# ------------------------------------------------ what is damaged


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.bfloat16, 0.5, 6.0), (torch.float16, 0.2, 1.5)], ids=str
)
def test_a_cast_model_is_damaged(family: str, dtype: torch.dtype, least: float, most: float) -> None:
    model = build(family).to(dtype)
    report = safe_rope.audit(model)
    name = str(dtype).removeprefix("torch.")
    assert not report.ok
    assert {m.verdict for m in report.modules} == {"damaged"}
    found = of(report, "inv_freq")
    assert len(found) == len(report.modules)
    assert f"inv_freq is {name} (module cast)" in found[0].source
    assert found[0].dtype == name
    assert least < found[0].phase_error_rad < most
    rotary = first_rotary(model)
    true = read_spec(rotary, find(rotary)).inv_freq().double()
    off = (true - true.to(dtype).double()).abs().max() * (LENGTH - 1)
    assert found[0].phase_error_rad == pytest.approx(float(off))
    forward = of(report, "forward")
    assert len(forward) == len(report.modules)
    assert forward[0].first_bad_position in (255, 256, 257, 2047, 2048, 8192)
    if has_caches(model):
        cache = of(report, "cos_cached, sin_cached")
        assert f"are {name} (cast)" in cache[0].source
        assert 1e-4 < cache[0].phase_error_rad < 1e-2
    else:
        assert forward[0].phase_error_rad == pytest.approx(float(off) / (LENGTH - 1) * 2 * LENGTH)


@pytest.mark.parametrize("rope_type", rope_types())
def test_a_cast_is_found_for_every_rope_type(rope_type: str) -> None:
    report = safe_rope.audit(build(rope_type=rope_type).bfloat16())
    assert not report.ok
    assert "bfloat16 (module cast)" in of(report, "inv_freq")[0].source


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_values_in_an_fp32_tensor_are_recognised(low: torch.dtype) -> None:
    model = build().to(low).float()
    report = safe_rope.audit(model)
    name = str(low).removeprefix("torch.")
    assert f"holds {name}-rounded values in a float32 tensor" in of(report, "inv_freq")[0].source
    assert of(report, "inv_freq")[0].dtype == "float32"
    if has_caches(model):
        assert f"hold {name}-rounded values in float32" in of(report, "cos_cached, sin_cached")[0].source


def test_frequencies_computed_in_bfloat16_are_recognised() -> None:
    model = build()
    exponents = torch.arange(0, 128, 2).to(torch.bfloat16) / 128
    for rotary in rotary_modules(model).values():
        rotary.inv_freq = (1.0 / (10000.0**exponents)).float()
    (source, *_) = {f.source for f in of(safe_rope.audit(model), "inv_freq")}
    assert "was computed in bfloat16 and widened to float32" in source


@pytest.mark.parametrize("garbage", [0.0, math.nan, 3e30, -1.0])
def test_uninitialised_tables_are_damaged(garbage: float) -> None:
    with torch.device("meta"):
        model = build()
    report = safe_rope.audit(model)
    assert not report.ok
    assert {m.verdict for m in report.modules} == {"unknown"}
    assert "meta device" in of(report, "inv_freq", "unknown")[0].source
    report.raise_if_damaged()

    model.to_empty(device="cpu")
    # What to_empty leaves is what the memory held before; it could even be right.
    for rotary in rotary_modules(model).values():
        for buffer in rotary.buffers():
            buffer.fill_(garbage)
    report = safe_rope.audit(model)
    assert {m.verdict for m in report.modules} == {"damaged"}
    assert "uninitialised" in of(report, "inv_freq")[0].source
    assert "uninitialised" in of(report, "forward")[0].source
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_guarded_model_survives_to_empty() -> None:
    with safe_rope.guard(), torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    report = safe_rope.audit(model)
    assert report.ok, str(report)


def test_writes_into_the_tables_are_found() -> None:
    model = build()
    rotary = first_rotary(model)
    with torch.no_grad():
        rotary.inv_freq[3] *= 1.001
        if has_caches(model):
            rotary.sin_cached[1000:1010] = 0.5
    report = safe_rope.audit(model)
    assert [m.verdict for m in report.modules].count("damaged") == 1
    assert "written to" in of(report, "inv_freq")[0].source
    if has_caches(model):
        (cache,) = of(report, "cos_cached, sin_cached")
        assert "written to in some rows" in cache.source
        assert cache.first_damaged_position == cache.first_bad_position == 1000


def test_a_table_of_the_wrong_amplitude_is_damaged() -> None:
    model = build()
    rotary = first_rotary(model)
    if has_caches(model):
        rotary.cos_cached.mul_(0.5)
        rotary.sin_cached.mul_(0.5)
    else:
        rotary.attention_scaling = 0.5
    (forward,) = of(safe_rope.audit(model), "forward")
    assert forward.phase_error_rad < 1e-3
    assert forward.cos_error == pytest.approx(0.5, abs=1e-2)


def test_the_rounding_of_cos_and_sin_is_a_note_not_damage() -> None:
    model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    assert {f.severity for f in report.findings} == {"note"}
    assert report.findings[0].source.startswith("rounded")
    assert 2**-10 < report.findings[0].cos_error <= 2**-8
    safe_rope.protect(model)
    assert not safe_rope.audit(model).findings


def test_protect_with_stock_application_is_noted_as_rounded() -> None:
    model = build().bfloat16()
    safe_rope.protect(model, apply="stock")
    report = safe_rope.audit(model)
    assert report.ok
    assert {f.severity for f in report.findings} == {"note"}


# ------------------------------------------------ modules of one's own


class PlainRotary(nn.Module):
    """A class that no patch covers, called with a length."""

    def __init__(self, position_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dim, self.base, self.max_position_embeddings = 128, 10000, LENGTH
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 128, 2).float() / 128)))
        positions = torch.arange(LENGTH).to(position_dtype).float()
        phases = torch.outer(positions, self.inv_freq).repeat(1, 2)
        self.max_seq_len_cached = LENGTH
        self.register_buffer("cos_cached", phases.cos())
        self.register_buffer("sin_cached", phases.sin())

    def forward(self, x: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq_len > len(self.cos_cached):
            # Falls for everything: a default device, a default dtype and autocast.
            positions = torch.arange(seq_len) * 1.0
            phases = (positions[:, None] @ self.inv_freq[None]).repeat(1, 2)
            self.cos_cached, self.sin_cached = phases.cos(), phases.sin()
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class LowForward(PlainRotary):
    """Right tensors, but ``forward`` multiplies in bfloat16."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].bfloat16() * self.inv_freq.bfloat16()
        phases = phases.float().repeat(1, 1, 2)
        return phases.cos(), phases.sin()


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


def test_frequencies_that_the_config_does_not_tell_are_unknown_not_ok() -> None:
    rotary = PlainRotary()
    rotary.base = 5000
    report = safe_rope.audit(rotary)
    assert not report.ok
    assert of(report, "inv_freq", "unknown")
    del rotary.dim
    report = safe_rope.audit(rotary)
    assert [f.severity for f in report.findings] == ["unknown"]
    assert "PlainRotary" in report.findings[0].source
    report.raise_if_damaged()


def test_a_forward_that_raises_is_unknown_not_ok() -> None:
    class Picky(PlainRotary):
        def forward(self, x: torch.Tensor, seq_len: int) -> Any:
            raise RuntimeError("not like this")

    report = safe_rope.audit(Picky())
    assert not report.ok
    assert "not like this" in of(report, "forward", "unknown")[0].source


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
    damaged = safe_rope.audit(model.bfloat16())
    assert len([f for f in damaged.damaged if f.what.startswith("forward")]) == 2


# ------------------------------------------------ nothing changes


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module: identity, version and bits of tensors, values of the rest."""
    seen: dict[str, Any] = {"rng": torch.get_rng_state().tolist(), "dtype": torch.get_default_dtype()}
    for path, module in model.named_modules():
        tensors = {**vars(module), **module._buffers, **module._parameters}
        seen[f"{path} class"] = type(module)
        seen[f"{path} names"] = (sorted(vars(module)), sorted(module._buffers))
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                bits = None if value.is_meta else value.detach().clone()
                seen[f"{path}.{name}"] = (id(value), value._version, value.dtype, value.grad is None, bits)
            elif isinstance(value, int | float | str | None):
                seen[f"{path}.{name}"] = value
    return seen


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, tuple) and value and isinstance(value[-1], torch.Tensor):
            assert value[:-1] == after[name][:-1], name
            assert value[-1].equal(after[name][-1]), name
        else:
            assert value == after[name] or value is after[name], name


def use(model: nn.Module, length: int) -> None:
    """Ask every rotary module for a sequence of ``length``, as a long generation does."""
    for rotary in rotary_modules(model).values():
        x = torch.zeros(1, 1, 1, 1)
        if has_caches(model):
            rotary(x, seq_len=length)
        else:
            rotary(x, torch.arange(length)[None])


@pytest.mark.parametrize("protected", [False, True], ids=["stock", "protected"])
@pytest.mark.parametrize("rope_type", rope_types())
@pytest.mark.parametrize("used", [0, 6000, 12000])
def test_an_audit_changes_nothing(rope_type: str, protected: bool, used: int) -> None:
    model = build(rope_type=rope_type)
    if protected:
        safe_rope.protect(model)
    if used:
        use(model, used)
    before = snapshot(model)
    report = safe_rope.audit(model)
    assert_same(before, snapshot(model))
    assert report.ok, str(report)
    assert len(report.modules[0].rows) == 10


def test_an_audit_leaves_the_application_and_its_count_alone() -> None:
    model = build()
    safe_rope.protect(model)
    patch = find(first_rotary(model))
    namespace = sys.modules[patch.modules[0]]
    wrapper = namespace.apply_rotary_pos_emb
    users = dict(application._users)
    assert safe_rope.audit(model).ok
    gc.collect()
    assert application._users == users

    def foreign(*args: Any, **kwargs: Any) -> None: ...

    namespace.apply_rotary_pos_emb = foreign
    try:
        report = safe_rope.audit(model)
        assert namespace.apply_rotary_pos_emb is foreign
    finally:
        namespace.apply_rotary_pos_emb = wrapper
    assert not report.ok
    assert "apply_rotary_pos_emb was replaced" in of(report, "application", "unknown")[0].source


@pytest.mark.parametrize("make", [build, PlainRotary], ids=["llama", "plain"])
def test_the_surroundings_have_no_influence(make: Any) -> None:
    model = make()
    report = safe_rope.audit(model)
    assert report.ok, str(report)
    expected = report.to_dict()
    with torch.autocast("cpu", torch.bfloat16):
        assert safe_rope.audit(model).to_dict() == expected
    with torch.inference_mode():
        assert safe_rope.audit(model).to_dict() == expected
    with torch.device("meta"):
        assert safe_rope.audit(model).to_dict() == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert safe_rope.audit(model).to_dict() == expected
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_hooks_and_foreign_wrappers_are_neither_called_nor_copied() -> None:
    model = build()
    rotary = first_rotary(model)

    class Engine:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the engine was copied")

        def hook(self, *args: Any) -> None:
            raise AssertionError("the hook was called")

    rotary.register_forward_pre_hook(Engine().hook)
    rotary.engine = Engine()
    assert safe_rope.audit(model).ok


# ------------------------------------------------ arguments and forms


def test_wrapped_models_are_audited() -> None:
    peft = pytest.importorskip("peft")
    target = "q_proj"
    wrapped = peft.get_peft_model(build().bfloat16(), peft.LoraConfig(target_modules=[target], r=2))
    report = safe_rope.audit(wrapped)
    assert len(report.modules) == len(rotary_modules(wrapped))
    assert not report.ok
    assert "base_model" in report.findings[0].path


def test_positions_can_be_chosen() -> None:
    report = safe_rope.audit(build(), positions=[100_000, 7, 7])
    assert [row.position for row in report.modules[0].rows] == [7, 100_000]
    assert report.ok, str(report)


@pytest.mark.parametrize("protected", [False, True], ids=["stock", "protected"])
def test_chosen_positions_are_those_of_a_fresh_sequence(protected: bool) -> None:
    model = build(rope_type="dynamic")
    if protected:
        safe_rope.protect(model)
    use(model, 12000)
    report = safe_rope.audit(model, positions=[LENGTH - 1, 2 * LENGTH])
    assert report.ok, str(report)


@pytest.mark.parametrize("positions", [[], [-1], [1.5], [True]])
def test_positions_that_are_none_are_refused(positions: Any) -> None:
    with pytest.raises(ConfigError, match="integers from 0 on, got"):
        safe_rope.audit(build(layers=1), positions)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="got str; pass the model"):
        safe_rope.audit("meta-llama/Llama-2-7b")  # type: ignore[arg-type]


def test_the_report_has_text_and_json_forms() -> None:
    report = safe_rope.audit(build().bfloat16())
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is False
    assert len(data["findings"]) == len(report.findings)
    assert data["modules"][0]["rows"][-1]["position"] == 2 * LENGTH
    text = str(report)
    assert re.search(r"rotary_emb.* +no +damaged +\d", text)
    assert "inv_freq is bfloat16 (module cast)" in text
    assert "\x1b" not in text
    with pytest.raises(DamagedTablesError, match=r"inv_freq is bfloat16 .*5\.01 rad") as caught:
        report.raise_if_damaged()
    assert "safe_rope.guard()" in str(caught.value)
    with pytest.raises(AttributeError):
        report.findings[0].path = "x"  # type: ignore[misc]


def test_layers_with_the_same_findings_share_a_line() -> None:
    layers = nn.ModuleDict({"layers": nn.ModuleList([PlainRotary().bfloat16() for _ in range(12)])})
    report = safe_rope.audit(layers)
    assert len(report.modules) == 12
    text = str(report)
    assert text.count("inv_freq is bfloat16 (module cast), relative") == 1
    assert "layers.* (12 modules)" in text
    assert len(text.splitlines()) < 10
