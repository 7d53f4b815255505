"""audit() measures rotary classes that no patch covers, and those of several layer types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audited import LowForward, PlainRotary, of
from torch import nn

import safe_rope


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
