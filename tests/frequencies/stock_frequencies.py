"""What the installed transformers computes for a config, and how a RopeSpec is held against it.

Works with transformers 4.36 (rotary classes), 4.57 and 5.x (functions by rope type).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

try:
    from transformers.models.phi3 import modeling_phi3
except ImportError:  # before transformers 4.41
    modeling_phi3 = None

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
        try:
            computed = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len, **layer)
            return _of_its_class(config, seq_len, *computed) if rope_type == "longrope" else computed
        except (AttributeError, TypeError) as error:  # GPT-NeoX and a longrope without a factor in 4.44
            pytest.skip(f"this transformers computes no frequencies here: {error}")
    rotary = next(value for name, value in vars(module).items() if name.endswith("RotaryEmbedding"))
    return rotary.compute_default_rope_parameters(config, **layer)


def _of_its_class(config: Any, seq_len: Any, inv_freq: torch.Tensor, scaling: float) -> Any:
    """What Phi-3 computes by a class of its own, where the release has one: its function knows no length."""
    own = getattr(modeling_phi3, "Phi3LongRoPEScaledRotaryEmbedding", None)
    if own is not None and config.model_type == "phi3":
        embedding = own(config.hidden_size // config.num_attention_heads, config)
        embedding(torch.zeros(1), torch.tensor([[(seq_len or 1) - 1]]))
        inv_freq = embedding.inv_freq
    return inv_freq, scaling


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


def assert_stock_bits(spec: RopeSpec, seq_len: Any, inv_freq: torch.Tensor) -> None:
    """This CPU's bits are the stock ones; the checkpoint's differ where its ``pow`` is not AVX-512's."""
    assert_same_bits(spec.inv_freq(seq_len, "machine"), inv_freq)
    checkpoint = spec.inv_freq(seq_len)
    assert torch.allclose(checkpoint, inv_freq, rtol=2.0**-19, atol=0.0)  # llama3's blend cancels
    assert_same_bits(checkpoint, spec.inv_freq(seq_len, "checkpoint"))


def assert_like_stock(config: Any, seq_len: Any = None, **layer: Any) -> RopeSpec:
    spec = RopeSpec.from_config(config, **layer)
    inv_freq, scaling = stock(config, seq_len, **layer)
    assert_stock_bits(spec, seq_len, inv_freq)
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


def longrope(dim: int, **options: Any) -> dict[str, Any]:
    count = dim // 2
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.013 * i for i in range(count)],
        "long_factor": [1.08 + 63.7 * i / count for i in range(count)],
        **options,
    }


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
