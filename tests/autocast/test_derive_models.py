"""The derived set is sound and minimal on real models: rounding tells."""

from __future__ import annotations

from typing import Any

import architectures
import pytest
import torch
from support.covering import in_turn
from torch import Tensor, nn

from safe_rope.autocast import derive_safe_parameters
from safe_rope.autocast.safety.choose import default_safe_parameters

DTYPES = (torch.bfloat16, torch.float16)
Step = tuple[Tensor, dict[str, Tensor]]


def logits(model: nn.Module, dtype: torch.dtype, inputs: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        output = model(**inputs)
    return output.logits if hasattr(output, "logits") else output[0]


def step(model: nn.Module, dtype: torch.dtype, inputs: dict[str, Tensor]) -> Step:
    """The logits and all gradients of one step under autocast."""
    model.zero_grad()
    result = logits(model, dtype, inputs)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(3))
    (result.float() * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return result.detach(), gradients


def assert_equal(one: Step, other: Step) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    different = [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]
    assert not different


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *in_turn([(name,) for name in architectures.EVERY_DAY], DTYPES),
        *(pytest.param(n, d, marks=pytest.mark.exhaustive) for n in architectures.OTHERS for d in DTYPES),
    ],
)
@pytest.mark.filterwarnings("ignore::safe_rope.errors.PrecisionWarning")
def test_the_derived_set_is_sound_and_minimal_and_has_all_of_the_default_one(
    name: str, dtype: torch.dtype
) -> None:
    model = architectures.build(name)
    inputs = architectures.inputs(model)
    report = derive_safe_parameters(model, **inputs, dtype=dtype)
    unused = {entry.name for entry in report.parameters if entry.reason.startswith("unused")}
    assert default_safe_parameters(model).safe <= report.safe | unused
    before = step(model, dtype, inputs)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter_name in report.safe & parameters.keys():
            parameter = parameters[parameter_name]
            parameter.copy_(parameter.to(dtype))
    assert_equal(before, step(model, dtype, inputs))
    model.zero_grad()

    kept = [entry for entry in report.parameters if not entry.safe and entry.name in parameters]
    harmless, harmful = [], []
    with torch.no_grad():
        for entry in kept:
            parameter = parameters[entry.name]
            own = parameter.clone()
            parameter.copy_(parameter.to(dtype))
            same = torch.equal(logits(model, dtype, inputs), before[0])
            (harmless if same else harmful).append(entry)
            parameter.copy_(own)
    assert not [entry for entry in harmless if not entry.reason.startswith("unused")]
    assert not [entry for entry in harmful if entry.reason.startswith("unused")]
    assert harmful
    assert report.safe


def test_a_tied_embedding_is_unsafe_under_both_names_and_says_what_reads_it() -> None:
    model = architectures.build("llama tied")
    report = derive_safe_parameters(model, **architectures.inputs(model))
    by_name = {entry.name: entry for entry in report.parameters}
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    for name, other in (names, names[::-1]):
        assert not by_name[name].safe
        assert by_name[name].tied_to == (other,)
        assert "aten.embedding in model.embed_tokens" in by_name[name].reason
        assert other in by_name[name].reason
    untied = architectures.build("llama")
    assert "lm_head.weight" in derive_safe_parameters(untied, **architectures.inputs(untied)).safe


def test_experts_that_autocast_does_not_cover_are_warned_about() -> None:
    names = [name for name in architectures.ARCHITECTURES if name.startswith("mixtral")]
    reports: dict[str, Any] = {}
    for name in names:
        model = architectures.build(name)
        reports[name] = derive_safe_parameters(model, **architectures.inputs(model))
    assert not reports["mixtral eager"].warnings
    assert all(name in reports["mixtral eager"].safe for name in expert_weights("mixtral eager"))
    if "mixtral grouped_mm" in names:
        assert not reports["mixtral batched_mm"].warnings
        (warning,) = reports["mixtral grouped_mm"].warnings
        assert "grouped_mm" in warning
        assert not set(expert_weights("mixtral grouped_mm")) & reports["mixtral grouped_mm"].safe


def expert_weights(name: str) -> list[str]:
    found = [n for n, _ in architectures.build(name).named_parameters() if ".experts." in n]
    assert found
    return found
