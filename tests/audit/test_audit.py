"""audit() measures real models: right ones are ok, and the report has its forms."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from audited import PlainRotary, use
from rotary_models import FAMILIES, LENGTH, build, first_rotary, rope_types, rotary_modules
from support import families
from torch import nn

import safe_rope
from safe_rope.errors import ConfigError, DamagedTablesError, UnsupportedModelError

ONE_ULP = 2.0**-23
EVERY_KIND = [*((family, "default") for family in FAMILIES), *(("llama", kind) for kind in rope_types()[1:])]


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
    assert "no position tables" in str(report)
    report.raise_if_damaged()


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


def test_position_0_alone_proves_nothing() -> None:
    model = build()
    assert safe_rope.audit(model, positions=[0]).ok
    assert safe_rope.audit(model.bfloat16(), positions=[0]).verdict != "ok"
    assert safe_rope.audit(model, positions=[1]).verdict == "damaged"
    safe_rope.protect(model)
    assert safe_rope.audit(model, positions=[0]).ok


@pytest.mark.parametrize("protected", [False, True], ids=["stock", "protected"])
def test_chosen_positions_are_those_of_a_fresh_sequence(protected: bool) -> None:
    model = build(rope_type="dynamic")
    if protected:
        safe_rope.protect(model)
    use(model, 12000)
    report = safe_rope.audit(model, positions=[LENGTH - 1, 2 * LENGTH])
    assert report.ok, str(report)


@pytest.mark.parametrize("protected", [False, True], ids=["stock", "protected"])
def test_a_module_that_never_notes_the_length_is_ok_at_any(
    protected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(rope_type="dynamic")
    if hasattr(first_rotary(model), "original_max_seq_len"):
        families.forget_the_length(first_rotary(model), monkeypatch)
        model = build(rope_type="dynamic")
    if protected:
        safe_rope.protect(model)
    use(model, 12000)
    use(model, 100)
    report = safe_rope.audit(model, positions=[0, 1, 100, LENGTH - 1, LENGTH, 2 * LENGTH])
    assert report.ok, str(report)
    rotary = first_rotary(model)
    if not protected:
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()
        assert safe_rope.audit(model).damaged


@pytest.mark.parametrize(
    "positions", [[], [-1], [1.5], [True], 5, torch.tensor(5), torch.tensor([0, -1]), torch.tensor([1.5])]
)
def test_positions_that_are_none_are_refused(positions: Any) -> None:
    with pytest.raises(ConfigError, match="integers from 0 on, got"):
        safe_rope.audit(build(layers=1), positions)


def test_positions_may_be_an_integer_tensor() -> None:
    given, asked = (safe_rope.audit(build(layers=1), these) for these in (torch.arange(3), range(3)))
    assert given.to_dict() == asked.to_dict()


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
    assert re.match(r"DAMAGED: LlamaForCausalLM: \d ", text)
    assert re.search(r"^damaged +no +\d.*rotary_emb$", text, re.MULTILINE)
    assert re.search(r"inv_freq,\s.*forward:\s+bfloat16 \(module cast\)", text, re.DOTALL)
    assert max(map(len, text.splitlines())) < 100
    assert repr(report).startswith("<AuditReport: DAMAGED: LlamaForCausalLM")
    assert report._repr_html_().startswith("<pre>DAMAGED: ")
    assert data["schema"] == "safe_rope.audit/2"
    assert "\x1b" not in text
    with pytest.raises(DamagedTablesError, match=r"(?s)inv_freq.*: bfloat16 .*rad") as caught:
        report.raise_if_damaged()
    assert "safe_rope.guard()" in str(caught.value)
    with pytest.raises(AttributeError):
        report.findings[0].path = "x"  # type: ignore[misc]


def test_layers_with_the_same_findings_share_a_line() -> None:
    layers = nn.ModuleDict({"layers": nn.ModuleList([PlainRotary().bfloat16() for _ in range(12)])})
    report = safe_rope.audit(layers)
    assert len(report.modules) == 12
    text = str(report)
    assert text.count("inv_freq: bfloat16 (module cast)") == 1
    assert "layers.* (12 modules)" in text
    assert len(text.splitlines()) < 16
