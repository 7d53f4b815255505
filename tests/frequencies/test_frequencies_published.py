"""RopeSpec reads published configs as their models mean them, and gives their stock frequencies."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from stock_frequencies import (
    HAS_FUNCTIONS,
    HAS_ROPE_PARAMETERS,
    NESTED,
    assert_stock_bits,
    llama_config,
    longrope,
    stock,
)
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from safe_rope.frequencies import RopeSpec

pytestmark = pytest.mark.contract

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
            assert_stock_bits(spec, length, inv_freq)
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
        assert_stock_bits(RopeSpec.from_config(local), None, stock_bits["sliding_attention"])
    for layer_type, inv_freq in stock_bits.items():
        assert_stock_bits(RopeSpec.from_config(config, layer_type), None, inv_freq)
        assert_stock_bits(RopeSpec.from_config(GEMMA3_4B, layer_type), None, inv_freq)


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
