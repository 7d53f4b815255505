"""A rotary class that nobody has described, which takes one position axis and no more."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import safe_rope


class OneAxisRotary(nn.Module):
    """As transformers 4.57 writes it: positions of several axes do not fit the frequencies."""

    def __init__(self, config: Any, dim: int = 16) -> None:
        super().__init__()
        self.config = config
        inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        phase = (columns @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((phase, phase), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def test_it_is_protected_fully() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    stock = OneAxisRotary(config)
    with safe_rope.guard(tables="fp32") as session:
        model = nn.Sequential(OneAxisRotary(config)).to(torch.bfloat16)
    assert [(entry.path, entry.level) for entry in session.report.protected] == [("0", "full")]
    ids = torch.tensor([[0, 1, 257, 4095], [5, 4000, 2, 3]])
    for expected, got in zip(stock(torch.zeros(1), ids), model[0](torch.zeros(1), ids), strict=True):
        assert torch.equal(torch.as_tensor(getattr(got, "table", got)), expected)


class WithTablesToShow(OneAxisRotary):
    """As transformers 4.38 writes it: tables besides, for whoever asks for them."""

    def __init__(self, config: Any, dim: int = 16) -> None:
        super().__init__(config, dim)
        emb = torch.outer(torch.arange(64).float(), self.inv_freq).repeat(1, 2)
        self.register_buffer("_cos_cached", emb.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("_sin_cached", emb.sin().to(torch.get_default_dtype()), persistent=False)


@pytest.mark.parametrize("how", ["guard", "protect"])
def test_tables_that_its_forward_does_not_read_stay_true(how: str) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    stock = WithTablesToShow(config)
    if how == "guard":
        with safe_rope.guard(tables="fp32"):
            model = nn.Sequential(WithTablesToShow(config)).to(torch.bfloat16)
    else:
        model = nn.Sequential(WithTablesToShow(config)).to(torch.bfloat16)
        safe_rope.protect(model, tables="fp32")
    for rotary in (model[0], copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model)).half()[0]):
        assert torch.equal(rotary._cos_cached, stock._cos_cached)
        assert torch.equal(rotary._sin_cached, stock._sin_cached)


class OwnDynamicNTKScalingRotary(nn.Module):
    """As Llama's in transformers 4.38 to 4.40: its tables are of positions divided by the factor."""

    def __init__(self, dim: int = 16, max_position_embeddings: int = 64, scaling_factor: float = 2.0) -> None:
        super().__init__()
        self.dim, self.base, self.scaling_factor = dim, 10000.0, scaling_factor
        self.max_position_embeddings = max_position_embeddings
        shape = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        self.register_buffer("inv_freq", 1.0 / (self.base**shape), persistent=False)
        positions = torch.arange(max_position_embeddings, dtype=torch.int64).type_as(self.inv_freq)
        emb = torch.outer(positions / scaling_factor, self.inv_freq).repeat(1, 2)
        self.register_buffer("_cos_cached", emb.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("_sin_cached", emb.sin().to(torch.get_default_dtype()), persistent=False)

    @property
    def cos_cached(self) -> torch.Tensor:
        return self._cos_cached

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = torch.max(position_ids) + 1
        if length > self.max_position_embeddings:
            grown = self.scaling_factor * length / self.max_position_embeddings - (self.scaling_factor - 1)
            base = self.base * grown ** (self.dim / (self.dim - 2))
            shape = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
            self.register_buffer("inv_freq", 1.0 / (base**shape), persistent=False)
        columns = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        phase = (columns @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((phase, phase), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    # A forward of transformers' own may write to its module.
    forward.__module__ = "transformers.models.own.modeling_own"


@pytest.mark.contract
@pytest.mark.parametrize("tables", ["exact", "fp32"])
@pytest.mark.parametrize("how", ["guard", "protect"])
def test_tables_to_show_that_its_forward_does_not_agree_with_stay_the_constructors(
    how: str, tables: Any
) -> None:
    stock = OwnDynamicNTKScalingRotary()
    if how == "guard":
        with safe_rope.guard(tables=tables) as session:
            model = nn.Sequential(OwnDynamicNTKScalingRotary())
        report = session.report
    else:
        model = nn.Sequential(OwnDynamicNTKScalingRotary())
        report = safe_rope.protect(model, tables=tables)
    assert [entry.level for entry in report.protected] == ["full"]
    model.to(torch.bfloat16)
    assert safe_rope.audit(model).ok
    for rotary in (model[0], copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model)).half()[0]):
        assert torch.equal(rotary.cos_cached, stock._cos_cached)
        assert torch.equal(rotary._sin_cached, stock._sin_cached)
        for last in (40, 100):
            ids = torch.arange(last)[None]
            for expected, got in zip(stock(torch.zeros(1), ids), rotary(torch.zeros(1), ids), strict=True):
                values = torch.as_tensor(getattr(got, "table", got))
                assert torch.allclose(values, expected, rtol=0, atol=1e-5)
        stock = OwnDynamicNTKScalingRotary()


@pytest.mark.contract
def test_the_audit_calls_tables_ok_that_are_what_their_constructor_gives() -> None:
    report = safe_rope.audit(nn.Sequential(OwnDynamicNTKScalingRotary()))
    assert report.ok, str(report)
    rounded = nn.Sequential(OwnDynamicNTKScalingRotary())
    for name in ("_cos_cached", "_sin_cached"):
        rounded[0]._buffers[name] = rounded[0]._buffers[name].bfloat16()
    report = safe_rope.audit(rounded)
    assert report.ok, str(report)
    assert "forward does not use them" in str(report)
    rounded[0]._buffers["inv_freq"] = rounded[0]._buffers["inv_freq"].bfloat16()
    assert safe_rope.audit(rounded).verdict == "damaged"
