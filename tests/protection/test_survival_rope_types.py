"""Every rope_type keeps its frequencies: scaled ones after a cast, others wherever the length goes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from support import families, survival
from torch import nn

import safe_rope

pytestmark = pytest.mark.filterwarnings("error::safe_rope.PrecisionWarning")

LIMIT = 64
HALF = {family: dim // 2 for family, dim in families.ROTARY_DIM.items()}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": LIMIT},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
LENGTHS = (
    10,
    63,
    LIMIT,
    LIMIT + 1,
    100,
    80,
    101,
    2 * LIMIT,
    2 * LIMIT + 1,
    300,
    LIMIT,
    LIMIT - 1,
    5,
    70,
    400,
    10,
)
"""Up over the limit, on beyond it, back to it and below, and up again."""


def _overrides(family: str, rope_type: str) -> dict[str, Any]:
    scaling = dict(SCALINGS[rope_type])
    if rope_type == "longrope":
        scaling["short_factor"] = [1.0 + i / 50 for i in range(HALF[family])]
        scaling["long_factor"] = [2.0 + i / 10 for i in range(HALF[family])]
    limit = 2 * LIMIT if rope_type == "longrope" else LIMIT
    overrides = {"max_position_embeddings": limit}
    if family == "mistral":
        overrides["head_dim"] = families.HEAD_DIM  # 4.57's dynamic NTK does without the default
    key = "type" if _has_old_classes(family) else "rope_type"
    return {**overrides, "rope_scaling": {key: rope_type, **scaling}}


def _has_old_classes(family: str) -> bool:
    return "seq_len" in inspect.signature(type(survival.stock_module(family)).forward).parameters


def _stock(family: str, rope_type: str) -> nn.Module:
    """The stock rotary module in FP32, after the test for whether this transformers has the type."""
    if _has_old_classes(family) and (family == "mistral" or rope_type not in ("linear", "dynamic")):
        pytest.skip(f"this transformers has no {rope_type} scaling for {family}")
    model = families.build(family, **_overrides(family, rope_type))
    (module, *_) = families.rotary_modules(model).values()
    return module


def _protected(family: str, rope_type: str, tables: str, how: str = "guard") -> nn.Module:
    overrides = _overrides(family, rope_type)
    if how == "guard":
        model = survival.build(family, tables, layers=1, **overrides)
    else:
        model = families.build(family, **overrides).to(torch.bfloat16)
        safe_rope.protect(model, tables=tables)
    (module, *_) = families.rotary_modules(model.to(torch.bfloat16)).values()
    return module


def _agree(
    module: nn.Module, stock: nn.Module, tables: str, length: int, scaling_factor: float = 1.0
) -> None:
    """Drive both modules with the positions below ``length``, and compare what they deliver and show."""
    positions = range(length)
    theirs = families.read_tables(stock, positions)
    mine = families.read_tables(module, positions, dtype=torch.bfloat16)
    # FP32 pow depends on the instruction set; the frequencies of exact tables do not.
    assert torch.allclose(module.inv_freq, stock.inv_freq, rtol=2.0**-19, atol=0.0), length
    if tables == "fp32":
        assert torch.equal(module.inv_freq, stock.inv_freq), length
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other), length
        return
    attention_scaling = getattr(stock, "attention_scaling", 1.0)
    frequencies = (module.inv_freq / scaling_factor).double()
    phase = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    truth = families.Tables(phase.cos() * attention_scaling, phase.sin() * attention_scaling)
    assert families.ulps(mine, truth) <= 1, length


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("rope_type", SCALINGS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_frequencies_follow_the_length_as_the_stock_ones_do(
    family: str, rope_type: str, tables: str, how: str
) -> None:
    stock = _stock(family, rope_type)
    module = _protected(family, rope_type, tables, how)
    # 4.36's linear classes divide the position; what they show is not what they use.
    divisor = getattr(stock, "scaling_factor", 1.0) if rope_type == "linear" else 1.0
    assert families.read_tables(stock, (7,), torch.bfloat16).cos.dtype == torch.bfloat16
    for length in LENGTHS:
        _agree(module, stock, tables, length, divisor)


@pytest.mark.parametrize("how", ["guard", "protect"])
@pytest.mark.parametrize("tables", survival.KINDS)
def test_a_module_that_never_notes_the_length_is_followed(
    tables: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = _stock("llama", "dynamic")
    if not hasattr(stock, "original_max_seq_len"):
        pytest.skip("in this transformers no module goes back to its trained length")
    families.forget_the_length(stock, monkeypatch)
    stock = _stock("llama", "dynamic")
    module = _protected("llama", "dynamic", tables, how)
    trained = stock.inv_freq.clone()
    for length in LENGTHS:
        _agree(module, stock, tables, length)
    assert not torch.equal(stock.inv_freq, trained), "a short sequence brought it back"


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_steps_of_decoding_follow_the_length_too(rope_type: str) -> None:
    stock, module = _stock("llama", rope_type), _protected("llama", rope_type, "exact")
    for position in (*range(LIMIT - 5, LIMIT + 5), *range(2 * LIMIT - 3, 2 * LIMIT + 3), 5, 6, 7):
        mine, theirs = (families.read_tables(one, (position,)) for one in (module, stock))
        for one, other in zip(mine, theirs, strict=True):
            assert torch.allclose(one, other, atol=1e-4), position


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_copy_that_is_cast_goes_on_where_the_original_was(family: str, rope_type: str) -> None:
    stock = _stock(family, rope_type)
    module = _protected(family, rope_type, "exact")
    for length in (10, 300):
        _agree(module, stock, "exact", length)
    duplicate, stock_duplicate = copy.deepcopy(module).half(), copy.deepcopy(stock)
    for length in (250, 301, 10, 90):
        _agree(duplicate, stock_duplicate, "exact", length)
    # The original is where it was.
    for length in (250, 299, 320):
        _agree(module, stock, "exact", length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_with_fractions_lengthen_as_the_stock_ones_do(
    rope_type: str, tables: str, dtype: torch.dtype
) -> None:
    stock, module = copy.deepcopy(_stock("llama", rope_type)), _protected("llama", rope_type, tables)
    if _has_old_classes("llama"):
        pytest.skip("this transformers asks for a length, which is an integer")
    for last in (10.0, LIMIT - 0.5, LIMIT + 30.25, LIMIT + 30.5, LIMIT - 2.5, 3.0 * LIMIT, LIMIT - 0.75, 5.5):
        positions = torch.arange(last, -1.0, -1.0, dtype=dtype)[None]
        theirs, mine = stock(torch.zeros(1), positions), module(torch.zeros(1), positions)
        assert torch.allclose(module.inv_freq, stock.inv_freq, rtol=2.0**-19, atol=0.0), last
        for one, other in zip(mine, theirs, strict=True):
            assert torch.allclose(getattr(one, "table", one), other, atol=1e-4), last
        assert safe_rope.audit(module).ok, last
        assert safe_rope.audit(stock).ok, last


def _rotary(model: nn.Module) -> nn.Module:
    (module, *_) = families.rotary_modules(model).values()
    return module


def test_each_of_several_models_of_one_config_begins_with_the_config() -> None:
    stocks = [copy.deepcopy(_stock("llama", "dynamic")) for _ in range(2)]
    config = families.config("llama", **_overrides("llama", "dynamic"))
    with safe_rope.guard():  # which can be open as long as the process; it remembers what it has worked out
        first = _rotary(families.model_class("llama")(config))
        for length in (10, 300):
            _agree(first, stocks[0], "exact", length)
        grown = first.inv_freq.clone()
        second = _rotary(families.model_class("llama")(config))
        for length in (10, 90, 250):
            _agree(second, stocks[1], "exact", length)
        assert torch.equal(first.inv_freq, grown)


def test_a_config_may_be_changed_between_two_models() -> None:
    config = families.config("llama")
    with safe_rope.guard():
        first = _rotary(families.model_class("llama")(config))
        holder = config.rope_parameters if hasattr(config, "rope_parameters") else config.__dict__
        holder["rope_theta"] *= 50
        second = _rotary(families.model_class("llama")(config))
    stock = _rotary(families.model_class("llama")(config))
    assert torch.allclose(second.inv_freq, stock.inv_freq, rtol=2.0**-19, atol=0.0)
    assert torch.allclose(first.inv_freq, _rotary(families.build("llama")).inv_freq, rtol=2.0**-19, atol=0.0)


@pytest.mark.parametrize("name", ["max_position_embeddings", "factor", "rope_theta"])
def test_a_sequence_that_grows_asks_the_config_as_it_is_then(name: str) -> None:
    stock, module = copy.deepcopy(_stock("llama", "dynamic")), _protected("llama", "dynamic", "exact")
    if not hasattr(stock, "original_max_seq_len"):
        pytest.skip("this transformers reads its config in the constructor only")
    for one in (stock, module):
        one.config = copy.deepcopy(one.config)
        rope = getattr(one.config, "rope_parameters", None) or one.config.rope_scaling
        if name in rope:
            rope[name] *= 3
        else:
            setattr(one.config, name, 3 * getattr(one.config, name))
    for length in (10, LIMIT + 30, 4 * LIMIT, 10, LIMIT + 5):
        _agree(module, stock, "exact", length)
    if name != "rope_theta":  # what stands in the short table is not what a constructor makes of that one
        assert safe_rope.audit(module).ok


@pytest.mark.parametrize("other", ["linear", "yarn"])
def test_a_sequence_that_grows_keeps_the_rule_of_its_module(other: str) -> None:
    stock, module = copy.deepcopy(_stock("llama", "dynamic")), _protected("llama", "dynamic", "exact")
    if not hasattr(getattr(stock, "config", None), "rope_parameters"):
        pytest.skip("before transformers 5 its rule asks for a length that only its own type has")
    for one in (stock, module):
        one.config = copy.deepcopy(one.config)
        one.config.rope_parameters = {"rope_type": other, "factor": 9.0, "rope_theta": 77.0}
        if other == "yarn":
            one.config.rope_parameters["original_max_position_embeddings"] = LIMIT
    for length in (10, LIMIT + 30, 4 * LIMIT):
        _agree(module, stock, "exact", length)


def test_a_sequence_that_grows_under_vmap_is_no_damage() -> None:
    module = _protected("llama", "dynamic", "exact")
    if not hasattr(module, "original_max_seq_len"):
        pytest.skip("this transformers has no way back from a long sequence")
    positions = torch.arange(3 * LIMIT)[None]
    torch.vmap(lambda x: tuple(module(x, positions)))(torch.zeros(2, 1, 3 * LIMIT, 8))
    assert safe_rope.audit(module).ok
    stock = _stock("llama", "dynamic")
    for length in (3 * LIMIT, 10, LIMIT + 5):
        _agree(module, stock, "exact", length)


@pytest.mark.parametrize("when", ["before the first forward", "after it"])
@pytest.mark.parametrize("name", ["original_max_position_embeddings", "long_factor", "short_factor"])
def test_longrope_asks_its_config_when_the_stock_module_does(name: str, when: str) -> None:
    stock, module = copy.deepcopy(_stock("llama", "longrope")), _protected("llama", "longrope", "exact")
    rope = getattr(stock.config, "rope_parameters", None)
    if rope is None:
        pytest.skip("before transformers 5 the short factors' length is another attribute's")
    if when == "after it":
        _agree(module, stock, "exact", 5)
    for one in (stock, module):
        one.config = copy.deepcopy(one.config)
        value = one.config.rope_parameters[name]
        one.config.rope_parameters[name] = LIMIT + 30 if isinstance(value, int) else [3 * v for v in value]
    for length in (10, LIMIT + 20, LIMIT + 40, 2 * LIMIT, 10):
        _agree(module, stock, "exact", length)
    assert safe_rope.audit(module).ok


@pytest.mark.parametrize("tables", survival.KINDS)
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "linear"])
def test_a_whole_model_gives_stock_logits_across_its_limit(rope_type: str, tables: str) -> None:
    _stock("llama", rope_type)
    overrides = _overrides("llama", rope_type)
    stock = families.build("llama", layers=2, **overrides)
    model = survival.build("llama", tables, **overrides)
    for length in (20, LIMIT + 30, 3 * LIMIT, 20, LIMIT - 1, LIMIT + 5):
        mine, theirs = survival.assert_runs(model, length), survival.assert_runs(stock, length)
        if tables == "fp32":
            assert torch.equal(mine, theirs), length
        else:
            assert torch.allclose(mine, theirs, atol=1e-4), length
