"""Frozen weights in tensors of a class that quantises, as torchao's: it refuses nearly all operators."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safe_rope
from safe_rope.errors import PrecisionWarning

aten = torch.ops.aten
DIM = 32


class Quantised(Tensor):
    """8 bits and a scale for each row, in the place of a weight."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.whole, made.scale = whole, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Quantised:
        scale = weight.detach().float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale, weight.dtype)

    def dequantize(self) -> Tensor:
        return (self.whole * self.scale).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Quantised:
        return cls(parts["whole"], parts["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].whole, args[0].scale, args[0].dtype)
        raise NotImplementedError(f"Quantised: {func}")


class Untold(Quantised):
    """Does not even tell what it stands for."""

    def dequantize(self) -> Tensor:
        raise NotImplementedError


class Attention(nn.Module):
    """Keeps its own table of sines, beside projections."""

    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(0, width, 2) / width)
        phases = torch.arange(64)[:, None] * rates
        self.register_buffer("embed_positions", torch.cat((phases.sin(), phases.cos()), -1), persistent=False)
        self.q_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x + self.embed_positions[: x.shape[1]].sin())


class TimeEncode(nn.Module):
    """TGN's: cosines of times by frequencies in a linear layer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.w = nn.Linear(1, dim, bias=False)
        self.w.weight = nn.Parameter((1 / 10 ** torch.linspace(0, 9, dim)).reshape(dim, 1))
        self.w.requires_grad_(False)

    def forward(self, times: Tensor) -> Tensor:
        return torch.cos(self.w(times[:, None]))


def quantise(model: nn.Module, kind: type[Quantised] = Quantised) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind.of(module.weight), requires_grad=False)
    return model


@pytest.mark.parametrize("kind", [Quantised, Untold])
@pytest.mark.parametrize("while_open", [True, False])
def test_a_quantised_weight_beside_a_table_stops_nothing(kind: type[Quantised], while_open: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        with safe_rope.guard() as session:
            model = nn.Sequential(Attention())
            if while_open:
                quantise(model, kind)
        if not while_open:
            quantise(model, kind)
        assert safe_rope.audit(model).verdict == "ok"
        report = safe_rope.protect(model)
    assert not session.report.left
    assert not report.left
    assert safe_rope.audit(model).verdict == "ok"


@pytest.mark.parametrize("kind", [Quantised, Untold])
def test_an_unguarded_model_with_quantised_weights_is_measured(kind: type[Quantised]) -> None:
    model = quantise(nn.Sequential(Attention()), kind)
    assert safe_rope.audit(model).verdict == "ok"
    model[0].embed_positions = model[0].embed_positions.bfloat16()
    assert safe_rope.audit(model).verdict == "damaged"


def test_frequencies_in_a_quantised_weight_are_named_as_in_any_other() -> None:
    with safe_rope.guard() as session:
        model = quantise(nn.Sequential(TimeEncode()))
    for left in (session.report.left, safe_rope.protect(model).left):
        assert [entry.reason.split()[0] for entry in left] == ["w.weight"]
