"""Small real models of the three families, in the form that the installed transformers takes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

LENGTH = 4096
FAMILIES = ("llama", "mistral", "gpt_neox")

_PAIRS = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0 + i / _PAIRS for i in range(_PAIRS)],
        "long_factor": [2.0 + i / 4 for i in range(_PAIRS)],
    },
}


def config(family: str = "llama", rope_type: str = "default", layers: int = 2) -> Any:
    """A config with head_dim 128 and 4,096 positions; ValueError where this release lacks the rope type."""
    common: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "vocab_size": 64,
        "max_position_embeddings": LENGTH,
    }
    classes = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "gpt_neox": transformers.GPTNeoXConfig,
    }
    if family != "gpt_neox":
        common["num_key_value_heads"] = 2
    if rope_type != "default":
        old = {"type": rope_type, **SCALINGS[rope_type]}
        new = {"rope_type": rope_type, **SCALINGS[rope_type]}
        common["rope_scaling"] = old if _has_per_layer_modules() else new
    return classes[family](**common)


def build(family: str = "llama", rope_type: str = "default", layers: int = 2) -> nn.Module:
    """A causal language model in FP32, seeded."""
    torch.manual_seed(0)
    built = config(family, rope_type, layers)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(built)
    return model


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every rotary module by its path, told by its class's name."""
    return {name: m for name, m in model.named_modules() if type(m).__name__.endswith("RotaryEmbedding")}


def first_rotary(model: nn.Module) -> Any:
    """The first rotary module."""
    return next(iter(rotary_modules(model).values()))


def _has_per_layer_modules() -> bool:
    from transformers.models.llama import modeling_llama

    return hasattr(modeling_llama, "LlamaLinearScalingRotaryEmbedding")


def rope_types() -> list[str]:
    """The rope types that the installed Llama has."""
    if _has_per_layer_modules():
        return ["default", "linear", "dynamic"]
    return ["default", *SCALINGS]
