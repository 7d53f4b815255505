"""RopeSpec gives the bits of the installed transformers, from its config objects and from published files.

The same file runs with transformers 4.36 (rotary classes), 4.57 and 5.x (functions by rope type).
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from safe_rope.frequencies import RopeSpec

try:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
except ImportError:  # before transformers 4.43
    ROPE_INIT_FUNCTIONS = None

HAS_FUNCTIONS = ROPE_INIT_FUNCTIONS is not None
HAS_PROPORTIONAL = HAS_FUNCTIONS and "proportional" in ROPE_INIT_FUNCTIONS
HAS_ROPE_PARAMETERS = hasattr(LlamaConfig(), "rope_parameters")

THETAS = (1e4, 5e5, 1e6, 10000, 1e7, 7777.7)
DIMS = (32, 64, 80, 96, 128, 192, 256)
NEEDS_FUNCTIONS = pytest.mark.skipif(
    not HAS_FUNCTIONS, reason="this transformers knows linear and dynamic only"
)
NEEDS_V5 = pytest.mark.skipif(not HAS_ROPE_PARAMETERS, reason="this transformers has no rope_parameters")


def llama_config(
    theta: float, head_dim: int, scaling: dict[str, Any] | None = None, **extra: Any
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_theta=theta,
        rope_scaling=copy.deepcopy(scaling),
        **{"max_position_embeddings": 4096, **extra},
    )


def stock(
    config: Any, seq_len: Any = None, layer_type: str | None = None, module: Any = modeling_llama
) -> tuple[torch.Tensor, float]:
    """Return inv_freq and attention scaling as the installed transformers computes them on CPU."""
    if not HAS_FUNCTIONS:
        return _stock_of_classes(config, seq_len, module), 1.0
    if HAS_ROPE_PARAMETERS:
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        rope_type = parameters["rope_type"]
        layer = {} if layer_type is None else {"layer_type": layer_type}
    else:
        scaling = getattr(config, "rope_scaling", None) or {}
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        layer = {}
    if rope_type in ROPE_INIT_FUNCTIONS:
        return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len, **layer)
    rotary = next(value for name, value in vars(module).items() if name.endswith("RotaryEmbedding"))
    return rotary.compute_default_rope_parameters(config, **layer)


def _stock_of_classes(config: Any, seq_len: int | None, module: Any) -> torch.Tensor:
    neox = module is modeling_gpt_neox
    dim = config.hidden_size // config.num_attention_heads
    dim = int(dim * config.rotary_pct) if neox else dim
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("type")
    middle = {None: "", "linear": "LinearScaling", "dynamic": "DynamicNTKScaling"}[kind]
    rotary = getattr(module, f"{'GPTNeoX' if neox else 'Llama'}{middle}RotaryEmbedding")
    options = {"scaling_factor": scaling["factor"]} if kind else {}
    base = config.rotary_emb_base if neox else config.rope_theta
    embedding = rotary(dim, max_position_embeddings=config.max_position_embeddings, base=base, **options)
    if seq_len is not None and seq_len > config.max_position_embeddings:
        embedding(torch.zeros(1), seq_len=seq_len)
    return embedding.inv_freq / options["scaling_factor"] if kind == "linear" else embedding.inv_freq


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype == torch.float32
    assert got.device.type == "cpu"
    assert torch.equal(got, expected), (got - expected).abs().max()


def assert_like_stock(config: Any, seq_len: Any = None, **layer: Any) -> RopeSpec:
    spec = RopeSpec.from_config(config, **layer)
    inv_freq, scaling = stock(config, seq_len, **layer)
    assert_same_bits(spec.inv_freq(seq_len), inv_freq)
    assert spec.attention_scaling == scaling
    return spec


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"type": "linear", "rope_type": "linear", "factor": 3.7},
    "linear by an integer": {"type": "linear", "rope_type": "linear", "factor": 8.0},
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, equal mscale": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, one mscale": {**YARN, "factor": 40, "mscale": 0.5},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.25},
    "yarn, betas": {**YARN, "factor": 16.3, "beta_fast": 48, "beta_slow": 2.5},
    "yarn, ramp of no width": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "yarn, no trained length": {"rope_type": "yarn", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3, other options": {**LLAMA3, "factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 3.3},
}


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
            assert_same_bits(spec.inv_freq(torch.tensor(length, dtype=dtype)), stock(config)[0])
    assert differs > 0, "a tensor and an integer would need no distinction"


@NEEDS_FUNCTIONS
def test_dynamic_rotary_module_passes_through_the_same_frequencies() -> None:
    config = llama_config(1e4, 64, {"rope_type": "dynamic", "factor": 3.3}, max_position_embeddings=64)
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    spec = RopeSpec.from_config(config)
    for length in (10, 64, 65, 200, 12):
        position_ids = torch.arange(length)[None]
        rotary(torch.zeros(1), position_ids)
        assert_same_bits(spec.inv_freq(position_ids.max() + 1), rotary.inv_freq)


def longrope(dim: int, **options: Any) -> dict[str, Any]:
    count = dim // 2
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.013 * i for i in range(count)],
        "long_factor": [1.08 + 63.7 * i / count for i in range(count)],
        **options,
    }


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
        assert_same_bits(spec.inv_freq(length), stock(config, length, module=modeling_gpt_neox)[0])


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


NESTED = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,  # transformers 5 reads it beside the layer types only
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


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
    assert_same_bits(spec.inv_freq(), inv_freq)
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
        assert_same_bits(spec.inv_freq(), getattr(rotary, f"{layer_type}_inv_freq"))


# ---- published configs ----------------------------------------------------------------------------------

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MISTRAL_7B_V03 = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
GPT_NEOX_20B = {
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
}
QWEN25_7B_1M = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1010000,
    "rope_theta": 10000000.0,
    "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
}
# The lists of factors have the published length, not the published values.
PHI3_128K = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": longrope(96)["short_factor"],
        "long_factor": longrope(96)["long_factor"],
    },
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
GEMMA3_4B = {  # published without rope_theta, head_dim and num_attention_heads
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
PUBLISHED: dict[
    str, tuple[dict[str, Any], int, float, float]
] = {  # rotary_dim, rope_theta, attention_scaling
    "Llama-3.1-8B": (LLAMA_31_8B, 128, 5e5, 1.0),
    "Mistral-7B-v0.3": (MISTRAL_7B_V03, 128, 1e6, 1.0),
    "GPT-NeoX-20B": (GPT_NEOX_20B, 24, 1e4, 1.0),
    "Qwen2.5-7B-Instruct-1M": (QWEN25_7B_1M, 128, 1e7, 1.0),
    "Phi-3-mini-128k": (PHI3_128K, 96, 1e4, math.sqrt(1 + math.log(32) / math.log(4096))),
    "DeepSeek-V3": (DEEPSEEK_V3, 64, 1e4, 1.0),
}


def config_class_for(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    return CONFIG_MAPPING[model_type]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_as_the_model_means_it(name: str) -> None:
    content, rotary_dim, theta, scaling = PUBLISHED[name]
    spec = RopeSpec.from_config(json.loads(json.dumps(content)))
    assert (spec.rotary_dim, spec.rope_theta, spec.attention_scaling) == (rotary_dim, theta, scaling)
    assert spec.inv_freq().shape == (rotary_dim // 2,)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_and_its_config_object_give_the_stock_bits(name: str) -> None:
    content = PUBLISHED[name][0]
    if not HAS_FUNCTIONS and content.get("rope_scaling"):
        pytest.skip("this transformers knows linear and dynamic only")
    config = config_class_for(content["model_type"]).from_dict(copy.deepcopy(content))
    from_file, from_object = RopeSpec.from_config(content), RopeSpec.from_config(config)
    module = modeling_gpt_neox if content["model_type"] == "gpt_neox" else modeling_llama
    for length in (None, 4096, 4097) if from_file.depends_on_length else (None,):
        inv_freq, scaling = stock(config, length, module=module)
        for spec in (from_file, from_object, RopeSpec.from_config(config.to_dict())):
            assert_same_bits(spec.inv_freq(length), inv_freq)
            assert spec.attention_scaling == scaling


def test_gemma3_file_is_read_for_each_layer_type() -> None:
    full = RopeSpec.from_config(GEMMA3_4B, "full_attention")
    local = RopeSpec.from_config(GEMMA3_4B, "sliding_attention")
    assert (full.rope_type, full.rope_theta, full.factor, full.rotary_dim) == ("linear", 1e6, 8.0, 256)
    assert (local.rope_type, local.rope_theta, local.factor, local.rotary_dim) == ("default", 1e4, None, 256)


def test_gemma3_rotary_modules_have_the_frequencies_of_their_layer_type() -> None:
    config_class = config_class_for("gemma3_text")
    from transformers.models.gemma3 import modeling_gemma3

    content = {**GEMMA3_4B["text_config"], "num_attention_heads": 8, "num_key_value_heads": 4}
    config = config_class.from_dict(copy.deepcopy(content))
    if HAS_ROPE_PARAMETERS:
        rotary = modeling_gemma3.Gemma3RotaryEmbedding(config)
        stock_bits = {name: getattr(rotary, f"{name}_inv_freq") for name in NESTED}
    else:
        local = copy.deepcopy(config)
        local.rope_theta, local.rope_scaling = config.rope_local_base_freq, {"rope_type": "default"}
        stock_bits = {"full_attention": stock(config)[0], "sliding_attention": stock(local)[0]}
        # the rotary module of local layers holds this config and does not know its layer type
        assert_same_bits(RopeSpec.from_config(local).inv_freq(), stock_bits["sliding_attention"])
    for layer_type, inv_freq in stock_bits.items():
        assert_same_bits(RopeSpec.from_config(config, layer_type).inv_freq(), inv_freq)
        assert_same_bits(RopeSpec.from_config(GEMMA3_4B, layer_type).inv_freq(), inv_freq)


def test_both_forms_of_a_file_mean_the_same() -> None:
    v5 = {key: value for key, value in LLAMA_31_8B.items() if key not in ("rope_theta", "rope_scaling")}
    v5["rope_parameters"] = {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert RopeSpec.from_config(v5) == RopeSpec.from_config(LLAMA_31_8B)


def test_old_names_of_longrope_are_understood() -> None:
    for name in ("su", "yarn"):
        content = {**PHI3_128K, "rope_scaling": {**PHI3_128K["rope_scaling"], "type": name}}
        assert RopeSpec.from_config(content) == RopeSpec.from_config(PHI3_128K)


def test_reading_a_config_changes_nothing_in_it() -> None:
    for content in (*[entry[0] for entry in PUBLISHED.values()], GEMMA3_4B):
        before = copy.deepcopy(content)
        RopeSpec.from_config(content, "full_attention")
        assert content == before
    config = llama_config(1e4, 64, {"type": "linear", "factor": 2.0})
    before = copy.deepcopy(config.to_dict())
    RopeSpec.from_config(config)
    assert config.to_dict() == before


def test_explicit_dimensions_win() -> None:
    assert RopeSpec.from_config(MISTRAL_7B_V03, head_dim=64).rotary_dim == 64
    spec = RopeSpec.from_config(GPT_NEOX_20B, head_dim=80, rotary_dim=32)
    assert (spec.head_dim, spec.rotary_dim) == (80, 32)
    assert RopeSpec.from_config({"rope_theta": 1e4}, rotary_dim=32).head_dim == 32
