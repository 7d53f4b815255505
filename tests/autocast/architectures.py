"""Tiny real models of many architectures, every weight of which a rounding to bfloat16 or float16 changes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_VISION = {"image_size": 16, "patch_size": 8, "num_labels": VOCABULARY}
# name: (config class, what is asked of it, which automatic class builds the model)
_KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", SIZES, "CausalLM"),
    "llama tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}, "CausalLM"),
    "mistral": ("MistralConfig", SIZES, "CausalLM"),
    "mixtral eager": ("MixtralConfig", SIZES | _EXPERTS | {"experts": "eager"}, "CausalLM"),
    "mixtral batched_mm": ("MixtralConfig", SIZES | _EXPERTS | {"experts": "batched_mm"}, "CausalLM"),
    "mixtral grouped_mm": ("MixtralConfig", SIZES | _EXPERTS | {"experts": "grouped_mm"}, "CausalLM"),
    "gpt2": ("GPT2Config", _GPT2, "CausalLM"),
    "gptj": ("GPTJConfig", _GPT2 | {"rotary_dim": 4}, "CausalLM"),
    "gpt_neox": ("GPTNeoXConfig", SIZES, "CausalLM"),
    "qwen2": ("Qwen2Config", SIZES, "CausalLM"),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}, "CausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | _EXPERTS | {"head_dim": 8, "experts": "eager"}, "CausalLM"),
    "gemma2": ("Gemma2Config", SIZES | {"head_dim": 8}, "CausalLM"),
    "gemma3": ("Gemma3TextConfig", SIZES | {"head_dim": 8}, "CausalLM"),
    "phi": ("PhiConfig", SIZES, "CausalLM"),
    "phi3": ("Phi3Config", SIZES, "CausalLM"),
    "falcon": ("FalconConfig", SIZES, "CausalLM"),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "CausalLM",
    ),
    "opt": ("OPTConfig", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16}, "CausalLM"),
    "t5": ("T5Config", _T5, "Seq2SeqLM"),
    "bart": ("BartConfig", _BART, "Seq2SeqLM"),
    "bert": ("BertConfig", SIZES, "MaskedLM"),
    "vit": ("ViTConfig", SIZES | _VISION, "ImageClassification"),
}


def _experts_can_be_chosen() -> bool:
    try:
        from transformers.integrations import moe
    except ImportError:
        return False
    return hasattr(moe, "batched_mm_experts_forward")


EXPERTS_CAN_BE_CHOSEN = _experts_can_be_chosen()
ARCHITECTURES = [
    name
    for name, (config, asked, _) in _KINDS.items()
    if hasattr(transformers, config) and (EXPERTS_CAN_BE_CHOSEN or asked.get("experts") in (None, "eager"))
]
# Each does something that no other of them does; the rest differ in sizes and names, as far as autocast sees.
_KINDS_OF_EVERY_DAY = (
    *("llama tied", "mixtral eager", "mixtral batched_mm", "mixtral grouped_mm", "gpt2", "gptj", "qwen3_moe"),
    *("gemma3", "falcon", "bloom", "t5", "bert", "vit"),
)
EVERY_DAY = [name for name in ARCHITECTURES if name in _KINDS_OF_EVERY_DAY]
OTHERS = [name for name in ARCHITECTURES if name not in _KINDS_OF_EVERY_DAY]


def build(name: str, seed: int = 0) -> Any:
    """A model of the architecture in eval mode, with weights that depend on ``seed`` only."""
    config, asked, kind = _KINDS[name]
    asked = dict(asked)
    experts = asked.pop("experts", None)
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**asked)
    if experts and EXPERTS_CAN_BE_CHOSEN:
        made._experts_implementation = experts
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(made)
    return roughen(model).eval()


def roughen(model: nn.Module) -> nn.Module:
    """Add noise to every floating parameter: norms of ones and biases of zeros would survive a rounding."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if parameter.dim() > 1 else 0.5
            parameter += scale * torch.randn(parameter.shape, generator=generator)
            for low in (torch.bfloat16, torch.float16):
                assert not torch.equal(parameter, parameter.to(low).float())
    return model


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """What the model's forward takes, enough of it that every expert gets a token."""
    generator = torch.Generator().manual_seed(2)
    config: Any = model.config
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = config.image_size
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    if config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids.flip(0)}
    return {"input_ids": ids}
