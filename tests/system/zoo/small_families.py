"""A tiny real model of each family whose application is not Llama's, and an input that it takes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **TEXT,
    **MOE,
    "num_key_value_heads": 2,
    "n_routed_experts": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
TINY = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TWO_KINDS = ["sliding_attention", "full_attention"]
IDS = torch.arange(40).view(2, 20) * 7 % 90 + 5
Case = tuple[str, dict[str, Any], Callable[[Any], dict[str, Any]]]


def ids(config: Any) -> dict[str, Any]:
    return {"input_ids": IDS}


def image(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.rand(2, 3, 64, 64, generator=generator)}


def several_axes(config: Any) -> dict[str, Any]:
    """Positions of time, height and width that differ, as pictures have them."""
    positions = torch.stack([torch.arange(20) % n + torch.arange(20) // n for n in (20, 5, 3)])
    return {"input_ids": IDS, "position_ids": positions[:, None].expand(3, 2, 20)}


def features(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"input_features": torch.rand(2, 40, 20, generator=generator)}


def video(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values_videos": torch.rand(1, 4, 3, 64, 64, generator=generator)}


def sound(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"input_values": torch.rand(2, 400, generator=generator)}


# Class, what its config is given, and the input.
FAMILIES: dict[str, Case] = {
    "gptj": (
        "GPTJModel",
        {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16, "n_positions": 512},
        ids,
    ),
    "codegen": (
        "CodeGenModel",
        {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 512},
        ids,
    ),
    "falcon": ("FalconModel", {**TEXT, "alibi": False}, ids),
    "phi": ("PhiModel", TEXT, ids),
    "persimmon": ("PersimmonModel", TEXT, ids),
    "stablelm": ("StableLmModel", TEXT, ids),
    "cohere": ("CohereModel", TEXT, ids),
    "mixtral": ("MixtralModel", {**TEXT, "num_local_experts": 2, "head_dim": 32}, ids),
    "qwen3_moe": ("Qwen3MoeModel", {**TEXT, **MOE, "num_experts": 2, "head_dim": 32}, ids),
    "gpt_oss": (
        "GptOssModel",
        {**TEXT, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 2, "rope_scaling": None},
        ids,
    ),
    "deepseek_v2": ("DeepseekV2Model", {**LATENT, "first_k_dense_replace": 2}, ids),
    "glm4": ("Glm4Model", {**TEXT, "head_dim": 32}, ids),
    "glm": ("GlmModel", {**TEXT, "head_dim": 32}, ids),
    "glm4v": (
        "Glm4vTextModel",
        {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        several_axes,
    ),
    "qwen2_vl": (
        "Qwen2VLTextModel",
        {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        several_axes,
    ),
    "qwen3_vl": (
        "Qwen3VLTextModel",
        {**TEXT, "head_dim": 32, "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}},
        several_axes,
    ),
    "gemma3": ("Gemma3TextModel", {**TEXT, "head_dim": 32, "layer_types": TWO_KINDS}, ids),
    "gemma3n": (
        "Gemma3nTextModel",
        {
            **TEXT,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "layer_types": TWO_KINDS * 2,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 16,
            "intermediate_size": [32] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 8,
        },
        ids,
    ),
    "gemma4": (
        "Gemma4TextModel",
        {
            **TEXT,
            "head_dim": 32,
            "global_head_dim": 32,
            "layer_types": TWO_KINDS,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 16,
        },
        ids,
    ),
    "llama4": (
        "Llama4TextModel",
        {
            **TEXT,
            "head_dim": 32,
            "num_local_experts": 2,
            "intermediate_size_mlp": 32,
            "attn_temperature_tuning": False,
            "moe_layers": [],
        },
        ids,
    ),
    "llama4_vision": (
        "Llama4VisionModel",
        {
            **TINY,
            "intermediate_size": 256,
            "image_size": 64,
            "patch_size": 16,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        image,
    ),
    "esm": (
        "EsmModel",
        {**TEXT, "position_embedding_type": "rotary", "emb_layer_norm_before": False, "mask_token_id": 3},
        ids,
    ),
    "modernbert": (
        "ModernBertModel",
        {**TEXT, "sep_token_id": 2, "cls_token_id": 1, "global_attn_every_n_layers": 2},
        ids,
    ),
    "dinov3": ("DINOv3ViTModel", {**TINY, "image_size": 64}, image),
    "vjepa2": (
        "VJEPA2Model",
        {
            "hidden_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "pred_hidden_size": 48,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 1,
            "crop_size": 64,
            "frames_per_clip": 4,
        },
        video,
    ),
    "wav2vec2_bert": (
        "Wav2Vec2BertModel",
        {**TINY, "feature_projection_input_dim": 20, "position_embeddings_type": "rotary"},
        features,
    ),
    "wav2vec2_conformer": (
        "Wav2Vec2ConformerModel",
        {
            **TINY,
            "conv_dim": (16, 16),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "position_embeddings_type": "rotary",
        },
        sound,
    ),
}


def present(families: dict[str, Case]) -> list[str]:
    """The families that the installed transformers has."""
    return [family for family, (name, _, _) in families.items() if _class(name) is not None]


def build(case: Case, seed: int = 0) -> Any:
    """The model of a family, the same weights every time."""
    name, options, _ = case
    cls = _class(name)
    assert cls is not None
    folder, _, config_name = name.rpartition(":")
    config_class = (
        getattr(_module(folder, "configuration"), config_name) if ":" in folder else cls.config_class
    )
    torch.manual_seed(seed)
    return cls(config_class(**copy.deepcopy(options))).eval()


def _class(name: str) -> Any:
    folder, _, rest = name.partition(":")
    if not rest:
        return getattr(transformers, name, None)
    try:
        return getattr(_module(folder, "modeling"), rest.partition(":")[0], None)
    except ModuleNotFoundError:
        return None


def _module(folder: str, kind: str) -> Any:
    folder = folder.partition(":")[0]
    return importlib.import_module(f"transformers.models.{folder}.{kind}_{folder}")


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every floating buffer and plain attribute of ``model`` that is more than one number."""
    found = {}
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                found[f"{path}.{name}"] = value
    return found
