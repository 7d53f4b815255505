"""audit() says what is damaged, by how much, and why."""

from __future__ import annotations

import json
import math

import pytest
import torch
from audited import has_caches, of
from rotary_models import FAMILIES, LENGTH, build, first_rotary, rope_types, rotary_modules

import safe_rope
from safe_rope._recognition.specs import read_spec
from safe_rope.registry import find


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
    assert found[0].source == f"{name} (module cast)"
    assert found[0].dtype == name
    assert least < found[0].phase_error_rad < most
    rotary = first_rotary(model)
    true = read_spec(rotary, find(rotary)).inv_freq().double()
    off = (true - true.to(dtype).double()).abs().max() * (LENGTH - 1)
    assert found[0].phase_error_rad == pytest.approx(float(off))
    assert {f.where for f in found} == {"module cast"}
    forward = of(report, "forward")
    assert len(forward) == len(report.modules)
    first = math.floor(0.1 / (float(off) / (LENGTH - 1))) + 1
    assert found[0].first_bad_position == first
    assert forward[0].first_bad_position == (2 * LENGTH if has_caches(model) else first)
    if has_caches(model):
        cache = of(report, "cos_cached, sin_cached")
        assert f"are {name} (cast)" in cache[0].source
        assert 1e-4 < cache[0].phase_error_rad < 1e-2
    else:
        longest = float(off) / (LENGTH - 1) * 2 * LENGTH
        assert forward[0].phase_error_rad == pytest.approx(longest)
        assert forward[0].where == "module cast"
        row = report.modules[0].rows[-1]
        assert row.phase_error_rad == pytest.approx(longest, rel=1e-3), "whole turns are counted"


@pytest.mark.skipif("dynamic" not in rope_types(), reason="this transformers has no such rope type")
def test_frequencies_that_are_put_back_after_a_long_sequence_are_damaged() -> None:
    model = build(rope_type="dynamic")
    rotary, true = first_rotary(model), first_rotary(build(rope_type="dynamic"))
    positions = torch.arange(3 * LENGTH)[None]
    buffers = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    if has_caches(model):
        pytest.skip("it takes no positions")
    torch.func.functional_call(rotary, buffers, (torch.zeros(1, 1, 1, 1), positions))
    if getattr(rotary, "max_seq_len_cached", 0) <= LENGTH:
        pytest.skip("it notes no length")
    report = safe_rope.audit(model)
    asked = torch.zeros(1, 1, 1, 1), positions[:, : 2 * LENGTH]
    off = float((rotary(*asked)[0] - true(*asked)[0]).abs().max())
    assert off > 0.1
    assert "while the module notes a longer sequence" in of(report, "inv_freq")[0].source
    rotary(torch.zeros(1, 1, 1, 1), positions[:, :4])
    assert safe_rope.audit(model).ok
    rotary(torch.zeros(1, 1, 1, 1), positions)
    assert safe_rope.audit(model).ok


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
    assert f"{name}-rounded values in a float32 tensor" in of(report, "inv_freq")[0].source
    assert of(report, "inv_freq")[0].dtype == "float32"
    if has_caches(model):
        assert f"hold {name}-rounded values in float32" in of(report, "cos_cached, sin_cached")[0].source


def test_frequencies_computed_in_bfloat16_are_recognised() -> None:
    model = build()
    exponents = torch.arange(0, 128, 2).to(torch.bfloat16) / 128
    for rotary in rotary_modules(model).values():
        rotary.inv_freq = (1.0 / (10000.0**exponents)).float()
    found = of(safe_rope.audit(model), "inv_freq")
    assert {f.where for f in found} == {"constructor"}
    assert {f.source for f in found} <= {
        "float32, computed in 16 bits (constructor intercepted or default dtype)",
        "computed in bfloat16 and widened to float32 (constructor intercepted or default dtype)",
    }


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


def test_tables_that_are_built_anew_from_a_damaged_inv_freq_are_told_apart() -> None:
    model = build()
    if not has_caches(model):
        pytest.skip("this release keeps no cached tables that a longer sequence could outgrow")
    for rotary in rotary_modules(model).values():
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    report = safe_rope.audit(model)
    assert not of(report, "cos_cached, sin_cached")
    (forward, *_) = of(report, "forward")
    assert forward.where == "cache rebuild"
    assert forward.first_damaged_position == 2 * LENGTH
    assert forward.phase_error_rad > 5, "whole turns are counted"


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


@pytest.mark.parametrize("change", [{"rope_theta": 5e5}, {"rope_theta": 10_100.0}, {"factor": 6.0}], ids=str)
@pytest.mark.parametrize("rope_type", ["default", *rope_types()])
def test_a_config_that_was_changed_later_damages_no_table(rope_type: str, change: dict[str, float]) -> None:
    model = build(rope_type=rope_type)
    rope = getattr(model.config, "rope_parameters", None)
    if rope is None or not change.keys() <= rope.keys():
        pytest.skip("this transformers keeps its parameters elsewhere, or has none of that name")
    with safe_rope.guard():
        guarded = build(rope_type=rope_type)
    for one in (model, guarded):
        one.config.rope_parameters.update(change)
    assert safe_rope.audit(guarded).ok
    report = safe_rope.audit(model)
    reads_it_later = rope_type == "dynamic" and "factor" in change
    assert report.verdict == ("ok" if reads_it_later else "unknown"), str(report)
    assert safe_rope.audit(model.bfloat16()).verdict == "damaged"


def test_a_theta_that_was_rounded_is_damage() -> None:
    model = build()
    for rotary in rotary_modules(model).values():
        rotary.inv_freq.copy_(1.0 / 9984.0 ** (torch.arange(0, 128, 2).float() / 128))  # 10000 in bfloat16
    assert safe_rope.audit(model).verdict == "damaged"


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


def test_a_theta_that_overflows_is_damage_of_the_constructor() -> None:
    model = build()
    overflowed = 1.0 / (torch.tensor(1e6, dtype=torch.float16) ** (torch.arange(0, 128, 2) / 128).half())
    assert overflowed[0] == 1
    assert not overflowed[1:].any()
    for rotary in rotary_modules(model).values():
        rotary.inv_freq = overflowed
        rotary.base = 1e6
        if getattr(rotary, "config", None) is not None:
            rotary.config.rope_theta = 1e6
            getattr(rotary.config, "rope_parameters", {}).update(rope_theta=1e6)
    found = of(safe_rope.audit(model), "inv_freq")
    assert {f.where for f in found} == {"constructor"}
    assert "computed in float16, in which theta is infinite" in found[0].source
    for rotary in rotary_modules(model).values():
        rotary.inv_freq = torch.zeros(64)
    assert "uninitialised" in of(safe_rope.audit(model), "inv_freq")[0].source


def test_dynamic_frequencies_that_no_length_gives_are_damaged() -> None:
    model = build(rope_type="dynamic")
    first_rotary(model).inv_freq[-1] = 1e-38  # as memory that nobody has filled
    report = safe_rope.audit(model)
    assert report.ok == has_caches(model)  # which a forward reads, where a module has them, and not this
