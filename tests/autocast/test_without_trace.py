"""The default set where nothing can be traced, and the check of an explicit list."""

from __future__ import annotations

import architectures
import pytest
import small_modules
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from safe_rope.autocast import derive_safe_parameters
from safe_rope.autocast.preflight import import_class
from safe_rope.autocast.safety.choose import check_safe_modules, default_safe_parameters
from safe_rope.errors import PrecisionWarning


class Plain(nn.Linear):
    """A subclass with its base's forward."""


class Masked(nn.Linear):
    """A subclass that reads its weight in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.weight > 0), self.bias)


class Zebra(nn.Module):
    """A class whose name is like no other's."""


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.plain, self.masked, self.conv = Plain(8, 8), Masked(8, 8), nn.Conv1d(8, 8, 1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight
        self.scaled = nn.Linear(8, 8)
        self.scale = nn.Parameter(self.scaled.weight.detach())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scaled(self.masked(self.plain(self.norm(self.embed(ids))))) * self.scale.mean()
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


def test_the_default_set_is_of_layers_that_hold_their_weights_alone() -> None:
    with pytest.warns(PrecisionWarning, match="example_inputs") as caught:
        report = default_safe_parameters(Mixed())
    assert len(caught) == 1
    assert report.safe == {"plain.weight", "plain.bias", "conv.weight", "conv.bias", "scaled.bias"}
    assert report.warnings == (str(caught[0].message),)


def test_an_explicit_list_is_told_what_is_unsafe_and_why() -> None:
    model = Mixed()
    report = derive_safe_parameters(model, torch.tensor([[1, 2, 3]]))
    safe, (complaint,) = check_safe_modules(model, [nn.Linear, nn.Conv1d], report)
    assert safe == {n for n in report.safe if n.split(".")[0] in ("plain", "masked", "conv", "scaled")}
    assert complaint.startswith("low precision is not safe for 3 parameters of the listed classes")
    for name in ("head.weight", "masked.weight", "scaled.weight"):
        assert f"{name} is read in float32" in complaint
    assert "head.weight is read in float32 by aten.embedding in embed" in complaint
    assert "aten.gt in masked" in complaint


def test_a_class_that_the_model_does_not_have_is_named_with_the_nearest_one() -> None:
    model = architectures.build("gpt2")
    report = derive_safe_parameters(model, **architectures.inputs(model))
    _, (nearest, none) = check_safe_modules(model, [nn.Conv1d, Zebra], report)
    assert "class torch.nn.Conv1d; did you mean transformers.pytorch_utils.Conv1D?" in nearest
    assert "did you mean" not in none
    safe, complaints = check_safe_modules(model, [type(model.transformer.h[0].attn.c_attn)], report)
    assert not complaints
    assert len(safe) == 2 * 8


def test_a_listed_class_stands_for_its_subclasses_by_any_of_its_names() -> None:
    model = nn.Sequential(Plain(8, 8))
    report = derive_safe_parameters(model, small_modules.example())
    named = map(import_class, ("torch.nn.Linear", "torch.nn.modules.linear.Linear"))
    for cls in (*named, nn.Linear, Plain):
        assert check_safe_modules(model, [cls], report) == ({"0.weight", "0.bias"}, [])
