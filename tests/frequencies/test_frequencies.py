"""RopeSpec gives the bits of the installed transformers for every rope type.

The same file runs with transformers 4.36 (rotary classes), 4.57 and 5.x (functions by rope type).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stock_frequencies import (
    DIMS,
    HAS_FUNCTIONS,
    HAS_PROPORTIONAL,
    HAS_ROPE_PARAMETERS,
    LLAMA3,
    NEEDS_FUNCTIONS,
    NEEDS_V5,
    NESTED,
    ROPE_INIT_FUNCTIONS,
    SCALINGS,
    THETAS,
    YARN,
    assert_like_stock,
    assert_same_bits,
    assert_stock_bits,
    llama_config,
    longrope,
    stock,
)
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from safe_rope.frequencies import RopeSpec


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_scaling_are_those_of_transformers(name: str) -> None:
    scaling = SCALINGS[name]
    if not HAS_FUNCTIONS and (scaling or {}).get("rope_type", "linear") != "linear":
        pytest.skip("this transformers knows linear and dynamic only")
    if scaling is not None and not HAS_FUNCTIONS:
        scaling = {"type": scaling["type"], "factor": scaling["factor"]}
    for theta, dim in itertools.product(THETAS, DIMS):
        spec = assert_like_stock(llama_config(theta, dim, scaling))
        assert not spec.depends_on_length


@pytest.mark.parametrize("factor", [1.0, 2.0, 1.3, 7.77])
def test_dynamic_ntk_follows_a_length_given_as_integer(factor: float) -> None:
    if not HAS_FUNCTIONS and factor == 1.0:
        pytest.skip("this transformers refuses a factor of one")
    for theta, dim in itertools.product(THETAS, DIMS):
        config = llama_config(theta, dim, {"type": "dynamic", "factor": factor}, max_position_embeddings=512)
        if HAS_ROPE_PARAMETERS:
            config.standardize_rope_params()
        elif HAS_FUNCTIONS:
            config.rope_scaling["rope_type"] = "dynamic"
        for length in (None, 1, 511, 512, 513, 1000, 4096, 100_003):
            if HAS_FUNCTIONS or length is None or length <= 5000:
                spec = assert_like_stock(config, length)
    assert spec.depends_on_length


@pytest.mark.slow
@NEEDS_FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_dynamic_ntk_follows_a_length_given_as_tensor(dtype: torch.dtype) -> None:
    differs = 0
    for theta, dim, factor in itertools.product(THETAS, DIMS, (1.0, 2.0, 1.3, 7.77)):
        scaling = {"rope_type": "dynamic", "factor": factor}
        config = llama_config(theta, dim, scaling, max_position_embeddings=512)
        for length in (513, 1000, 4096, 100_003, 20_000_001):
            tensor = torch.tensor(length, dtype=dtype)
            spec = assert_like_stock(config, tensor)
            differs += not torch.equal(spec.inv_freq(length), spec.inv_freq(tensor))
        for length in (1, 512):
            assert_stock_bits(spec, torch.tensor(length, dtype=dtype), stock(config)[0])
    assert differs > 0, "a tensor and an integer would need no distinction"


@NEEDS_FUNCTIONS
def test_dynamic_rotary_module_passes_through_the_same_frequencies() -> None:
    config = llama_config(1e4, 64, {"rope_type": "dynamic", "factor": 3.3}, max_position_embeddings=64)
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    spec = RopeSpec.from_config(config)
    for length in (10, 64, 65, 200, 12):
        position_ids = torch.arange(length)[None]
        rotary(torch.zeros(1), position_ids)
        assert_stock_bits(spec, position_ids.max() + 1, rotary.inv_freq)


@NEEDS_FUNCTIONS
@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, {"original_max_position_embeddings": 512}),
        ({"factor": 8.0}, {"original_max_position_embeddings": 512}),
        ({"attention_factor": 1.19}, {"original_max_position_embeddings": 512}),
        ({"factor": 5.0}, {}),
        ({"attention_factor": 1.1, "factor": 2.0}, {}),
        ({"factor": 3.0}, {"original_max_position_embeddings": 512}),  # not the ratio: the versions differ
        ({"factor": 3.0, "original_max_position_embeddings": 256}, {}),  # in the dict: the versions differ
        ({"factor": 3.0, "original_max_position_embeddings": 256}, {"original_max_position_embeddings": 512}),
        ({}, {"original_max_position_embeddings": 8192}),
    ],
)
def test_longrope_changes_its_factors_at_the_trained_length(
    options: dict[str, Any], extra: dict[str, Any]
) -> None:
    for theta, dim in itertools.product(THETAS, DIMS):
        config = llama_config(theta, dim, longrope(dim, **options), **extra)
        for length in (None, 1, 255, 256, 257, 512, 513, 4096, 4097, 9000):
            spec = assert_like_stock(config, length)
            if length is not None:
                assert_same_bits(spec.inv_freq(torch.tensor(length)), spec.inv_freq(length))
        assert spec.depends_on_length


@NEEDS_FUNCTIONS
def test_a_stretch_of_nearly_one_decides_how_a_base_between_two_floats_is_rounded() -> None:
    scaling = {"rope_type": "dynamic", "factor": 40.47144928036907}
    assert_like_stock(llama_config(24_900_581, 6, scaling, max_position_embeddings=105_327), None)


@NEEDS_FUNCTIONS
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_options_give_the_bits_of_transformers(data: st.DataObject) -> None:
    theta = data.draw(st.floats(2.0, 1e8) | st.integers(2, 10**8))
    dim = 2 * data.draw(st.integers(2, 128))
    factor = data.draw(st.floats(1.0, 64.0) | st.integers(1, 64))
    kind = data.draw(st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope"]))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    extra: dict[str, Any] = {"max_position_embeddings": data.draw(st.integers(2048, 1_000_000))}
    trained = data.draw(st.integers(8, 2047))
    if kind == "yarn":
        slow = data.draw(st.floats(0.5, 4))
        options = st.fixed_dictionaries(
            {"original_max_position_embeddings": st.just(trained)},
            optional={
                "beta_fast": st.floats(slow, 64),
                "truncate": st.booleans(),
                "mscale": st.floats(0, 2),
                "mscale_all_dim": st.floats(0, 2),
                "attention_factor": st.floats(0.5, 2),
            },
        )
        scaling |= {"beta_slow": slow, **data.draw(options)}
        if scaling.get("beta_fast") is None and slow > 32:
            del scaling["beta_slow"]
    elif kind == "llama3":
        low = data.draw(st.floats(0.25, 4))
        scaling |= {
            "original_max_position_embeddings": trained,
            "low_freq_factor": low,
            "high_freq_factor": low + data.draw(st.floats(0.25, 8)),
        }
    elif kind == "longrope":
        scaling |= longrope(dim)
        extra["original_max_position_embeddings"] = trained
    lengths = st.none() | st.integers(1, 2_000_000)
    seq_len = data.draw(lengths) if kind in ("dynamic", "longrope") else None
    assert_like_stock(llama_config(theta, dim, scaling, **extra), seq_len)


@pytest.mark.parametrize("kind", [None, "linear", "dynamic"])
@pytest.mark.parametrize("pct", [0.25, 0.4, 1.0])
def test_partial_rotary_factor_of_gpt_neox(kind: str | None, pct: float) -> None:
    scaling = {"type": kind, "factor": 2.0} if kind else None
    config = GPTNeoXConfig(
        hidden_size=320,
        num_attention_heads=4,
        rotary_pct=pct,
        rotary_emb_base=25_000,
        max_position_embeddings=512,
        rope_scaling=scaling,
    )
    spec = RopeSpec.from_config(config)
    assert spec.rotary_dim == int(80 * pct)
    assert spec.head_dim == 80
    for length in (None, 700) if kind == "dynamic" else (None,):
        assert_stock_bits(spec, length, stock(config, length, module=modeling_gpt_neox)[0])


@NEEDS_FUNCTIONS
@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_partial_rotary_factor_shortens_scaled_frequencies(scaling: dict[str, Any]) -> None:
    spec = assert_like_stock(llama_config(1e4, 128, scaling, partial_rotary_factor=0.5))
    assert spec.rotary_dim == 64


def test_unscaled_linear_frequencies_are_those_of_the_default_type() -> None:
    config = {"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}
    scaled = RopeSpec.from_config(config)
    unscaled = RopeSpec.from_config({"rope_theta": 1e4, "head_dim": 64})
    assert scaled.unscaled() == unscaled
    assert_same_bits(scaled.inv_freq(), unscaled.inv_freq() / 4.0)


# ---- transformers 5: parameters per layer type ----------------------------------------------------------


def nested_config(**parameters: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        num_hidden_layers=2,
        layer_types=list(NESTED),
        rope_parameters=copy.deepcopy({**NESTED, **parameters}),
    )


@NEEDS_V5
@pytest.mark.parametrize("layer_type", list(NESTED))
@pytest.mark.parametrize("outer", [{}, {"truncate": False}])
def test_each_layer_type_has_its_frequencies(layer_type: str, outer: dict[str, Any]) -> None:
    config = nested_config(**outer)
    spec = RopeSpec.from_config(config, layer_type)
    if layer_type == "full_attention":
        inv_freq, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, layer_type=layer_type)
        assert spec.attention_scaling == scaling
    else:
        inv_freq = stock(llama_config(1e4, 128))[0]
    assert_stock_bits(spec, None, inv_freq)
    assert RopeSpec.from_config(config.to_dict(), layer_type) == spec


@pytest.mark.skipif(not HAS_PROPORTIONAL, reason="this transformers has no proportional RoPE")
@pytest.mark.parametrize("proportion", [0.0, 0.25, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("factor", [None, 1.0, 8.0])
def test_proportional_frequencies_end_in_zeros(proportion: float, factor: float | None) -> None:
    scaling = {"rope_type": "proportional", "partial_rotary_factor": proportion}
    scaling |= {} if factor is None else {"factor": factor}
    for theta, dim in itertools.product(THETAS, DIMS):
        config = LlamaConfig(
            hidden_size=2 * dim, num_attention_heads=2, rope_parameters={"rope_theta": theta, **scaling}
        )
        spec = assert_like_stock(config)
        inv_freq = spec.inv_freq()
        turning = int(proportion * dim // 2)
        assert inv_freq.shape == (dim // 2,)
        assert (inv_freq[:turning] > 0).all()
        assert (inv_freq[turning:] == 0).all()


def test_heads_that_differ_between_layer_types() -> None:
    try:
        from transformers import Gemma4TextConfig
    except ImportError:
        pytest.skip("this transformers has no Gemma 4")
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    config = Gemma4TextConfig(num_hidden_layers=6)
    rotary = Gemma4TextRotaryEmbedding(config)
    for layer_type, head_dim in (("full_attention", 512), ("sliding_attention", 256)):
        spec = RopeSpec.from_config(config, layer_type)
        assert spec.head_dim == head_dim
        assert_stock_bits(spec, None, getattr(rotary, f"{layer_type}_inv_freq"))
