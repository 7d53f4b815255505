"""Negative positions, as padding of -1 has them, are computed as the stock model computes them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers
from support import families, survival
from torch import nn

import safe_rope

IDS = torch.tensor([[-1, -1, 0, 1, 2], [-4095, -7, 255, 257, 2049]])
PADDED = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5]])
TOKENS = torch.tensor([[0, 0, 11, 12, 13, 14, 15, 16]])


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


def rotary(family: str, tables: str) -> Any:
    (module, *_) = families.rotary_modules(survival.build(family, tables)).values()
    if not takes_positions(module):
        pytest.skip("this transformers calls its rotary modules with a length")
    return module


def half(table: torch.Tensor) -> torch.Tensor:
    table = getattr(table, "table", table)
    return table[..., : table.shape[-1] // 2].detach()


def assert_true(family: str, tables: str, answer: tuple[torch.Tensor, ...], ids: torch.Tensor = IDS) -> None:
    got = families.Tables(*(half(table) for table in answer))
    if tables == "exact":
        truth = families.reference(family, ids.flatten().tolist())
        shape = (*ids.shape, -1)
        assert families.ulps(got, families.Tables(truth.cos.view(shape), truth.sin.view(shape))) <= 1
    else:
        expected = survival.stock_module(family)(torch.zeros(1), ids)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, half(theirs))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_rotary_module_computes_them(family: str, tables: str, dtype: torch.dtype) -> None:
    module = rotary(family, tables)
    for x in (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)):
        assert_true(family, tables, module(x.float(), IDS.to(dtype)))
        assert [table.shape for table in module(x, IDS)] == [
            table.shape for table in survival.stock_module(family)(x, IDS)
        ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("tables", survival.KINDS)
def test_a_compiled_rotary_module_computes_them(tables: str, backend: str) -> None:
    module = rotary("llama", tables)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    assert_true("llama", tables, compiled(torch.zeros(1), IDS))


@pytest.mark.parametrize("tables", survival.KINDS)
def test_an_exported_rotary_module_computes_them(tables: str) -> None:
    module = rotary("llama", tables)
    args = (torch.zeros(1), torch.arange(10).view(2, 5))
    try:
        torch.export.export(copy.deepcopy(survival.stock_module("llama")), args)
    except Exception:
        pytest.skip("this torch cannot export the stock module of this transformers either")
    exported = torch.export.export(module, args).module()
    assert_true("llama", tables, exported(torch.zeros(1), IDS))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_padded_model_gives_the_logits_of_the_stock_one(family: str, weights: torch.dtype) -> None:
    models = {"stock": families.build(family)}
    for tables in survival.KINDS:
        models[tables] = survival.build(family, tables, layers=1)
    with torch.no_grad():
        true = models["stock"](TOKENS, position_ids=PADDED).logits
        expected: torch.dtype | None = None
        for name, model in models.items():
            logits = model.to(weights)(TOKENS, position_ids=PADDED).logits
            expected = expected or logits.dtype  # before transformers 4.45 logits are always in FP32
            assert logits.dtype == expected
            tolerance = 1e-5 if weights == torch.float32 else 0.05
            assert torch.allclose(logits.float(), true, atol=tolerance), name


ROPE_TYPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0 + i / 64 for i in range(64)],
        "long_factor": [2.0 + i / 4 for i in range(64)],
    },
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_every_rope_type_computes_them_as_stock(rope_type: str) -> None:
    try:
        config = families.config("llama", rope_scaling={"rope_type": rope_type, **ROPE_TYPES[rope_type]})
        stock = transformers.LlamaModel(config)
        module = next(iter(families.rotary_modules(stock).values()))
        assert takes_positions(module)
        expected = module(torch.zeros(1), IDS)
    except Exception:
        pytest.skip("this transformers has no such rotary module that takes positions")
    for tables in survival.KINDS:
        with safe_rope.guard(tables=tables):
            model = transformers.LlamaModel(config)
        (guarded,) = families.rotary_modules(model).values()
        for got, true in zip(guarded(torch.zeros(1), IDS), expected, strict=True):
            got = getattr(got, "table", got)
            assert torch.equal(got, true) if tables == "fp32" else (got - true).abs().max() < 1e-3


class Own(nn.Module):
    """Looks positions up in finished tables, the last row standing for padding."""

    def __init__(self) -> None:
        super().__init__()
        phase = torch.outer(torch.arange(64).float(), 1e4 ** -(torch.arange(0, 16, 2) / 16).float())
        self.register_buffer("table", torch.cat((phase.sin(), phase.cos()), -1), persistent=False)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.table[position_ids]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_table_that_is_indexed_gives_the_row_that_stock_gives(weights: torch.dtype) -> None:
    with safe_rope.guard():
        model = nn.Sequential(Own()).to(weights)
    stock = nn.Sequential(Own()).to(weights)
    assert torch.equal(model(PADDED), stock(PADDED))


def test_several_axes_compute_them() -> None:
    modelling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    config = transformers.Qwen2VLConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]},
    )
    config = getattr(config, "text_config", config)
    try:
        stock = modelling.Qwen2VLRotaryEmbedding(config=config)
        ids = torch.stack([IDS, IDS - 3, IDS.clamp(min=-1)])
        expected = stock(torch.zeros(1), ids)
    except Exception:
        pytest.skip("this transformers builds it in another way")
    with safe_rope.guard(tables="fp32"):
        model = nn.Sequential(modelling.Qwen2VLRotaryEmbedding(config=config))
    for got, true in zip(model[0](torch.zeros(1), ids), expected, strict=True):
        assert torch.equal(getattr(got, "table", got), true)
