"""Which parameters an engine communicates in the autocast dtype: from a trace, the classes, or a list."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import architectures
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from safe_rope.autocast import derive_safe_parameters
from safe_rope.autocast.safety import SafetyReport, choose_parameters
from safe_rope.autocast.settings import AutocastSettings
from safe_rope.errors import ConfigError, PrecisionWarning

pytestmark = pytest.mark.usefixtures("deepspeed_group")


def settings(modules: Literal["auto"] | tuple[type[nn.Module], ...] = "auto") -> AutocastSettings:
    return AutocastSettings(torch.bfloat16, modules, 2, 1, torch.bfloat16, 1000)


def choose(model: nn.Module, *arguments: Any) -> tuple[set[str], SafetyReport]:
    """The names of the chosen parameters, and the report."""
    parameters, report = choose_parameters(model, *arguments)
    chosen = {id(parameter) for parameter in parameters}
    assert len(chosen) == len(parameters)
    return {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in chosen}, report


class Silent(nn.Module):
    """A model that says nothing about its inputs, with a parameter that only a trace finds safe."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.raw = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.raw


def test_auto_traces_with_the_inputs_that_there_are() -> None:
    everything = {"linear.weight", "linear.bias", "raw"}
    x = torch.randn(2, 8)
    sources: list[tuple[Any, ...]] = [(x,), (None, TensorDataset(x, torch.ones(2)))]
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrecisionWarning)
            names, report = choose(Silent(), settings(), *source)
        assert names == report.safe == everything


def test_auto_without_inputs_warns_and_takes_the_classes() -> None:
    with pytest.warns(PrecisionWarning, match="example_inputs"):
        names, _ = choose(Silent(), settings())
    assert names == {"linear.weight", "linear.bias"}


def test_a_model_of_transformers_needs_no_inputs() -> None:
    model = architectures.build("gpt2")
    names, _ = choose(model, settings())
    assert names == derive_safe_parameters(model, **architectures.inputs(model)).safe


def test_an_unsafe_entry_of_a_list_stays_out_and_is_named_with_its_reader() -> None:
    model = architectures.build("llama tied")
    with pytest.warns(PrecisionWarning, match=r"lm_head\.weight is read in float32 by aten\.embedding"):
        names, _ = choose(model, settings((nn.Linear,)))
    assert "lm_head.weight" not in names
    assert "model.layers.0.self_attn.q_proj.weight" in names


def test_a_listed_class_that_the_model_lacks_is_named() -> None:
    with pytest.warns(PrecisionWarning, match="has no module of the class torch.nn.Conv2d"):
        names, _ = choose(Silent(), settings((nn.Linear, nn.Conv2d)), torch.ones(2, 8))
    assert names == {"linear.weight", "linear.bias"}


def test_given_inputs_that_do_not_fit_are_an_error_and_others_are_not() -> None:
    with pytest.raises(ConfigError, match="example_inputs"):
        choose_parameters(Silent(), settings(), {"nothing": torch.ones(2, 8)})
    with pytest.raises(RuntimeError):
        choose_parameters(Silent(), settings(), torch.ones(2, 9))
    with pytest.warns(PrecisionWarning):
        choose_parameters(Silent(), settings(), None, TensorDataset(torch.ones(2, 9)))
