"""A tiny real model for each way of applying the embedding that no family of `small_families` stands for."""

from __future__ import annotations

from typing import Any

import torch
from small_families import IDS, LATENT, MOE, TEXT, TINY, TWO_KINDS, Case, features, ids, image, several_axes

AXES = {"rope_type": "default", "rope_theta": 10000.0}
MEMORY = {
    "memory_attention_hidden_size": 64,
    "memory_attention_num_layers": 1,
    "memory_attention_num_attention_heads": 2,
    "memory_attention_feed_forward_hidden_size": 32,
    "memory_attention_mlp_hidden_size": 32,
    "memory_attention_rope_feat_sizes": [4, 4],
    "memory_attention_rope_k_sizes": [2, 2],
    "memory_encoder_output_channels": 64,
    "attn_implementation": "eager",
}
VISION = {"hidden_size": 64, "depth": 1, "num_hidden_layers": 1, "num_heads": 2, "num_attention_heads": 2}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def pictures_and_memory(config: Any) -> dict[str, Any]:
    return {
        "current_vision_features": numbers(16, 2, 64),
        "memory": numbers(16, 2, 64, seed=1),
        "current_vision_position_embeddings": numbers(16, 2, 64, seed=2),
        "memory_posision_embeddings": numbers(16, 2, 64, seed=3),
    }


def pictures_and_small_memory(config: Any) -> dict[str, Any]:
    memory = {"memory": numbers(16, 2, 64, seed=1), "memory_posision_embeddings": numbers(16, 2, 64, seed=3)}
    return pictures_and_memory(config) | memory | {"num_spatial_memory_tokens": 2}


def patches(config: Any) -> dict[str, Any]:
    name = "hidden_states" if config.model_type.startswith("qwen") else "pixel_values"
    return {name: numbers(16, 3 * 2 * 14 * 14), "grid_thw": torch.tensor([[1, 4, 4]])}


def merged_patches(config: Any) -> dict[str, Any]:
    side = 2 * config.patch_size
    return {"pixel_values": numbers(4, side, side, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])}


def patches_at_positions(config: Any) -> dict[str, Any]:
    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), dim=-1)
    return {"pixel_values": numbers(1, 36, 3 * 16 * 16), "pixel_position_ids": places.view(1, 36, 2)}


def mel(config: Any) -> dict[str, Any]:
    return {"input_features": numbers(1, config.num_mel_bins, 60)}


def text_and_sound(config: Any) -> dict[str, Any]:
    said = torch.full((1, 20), config.audio_token_id)
    return {
        "input_ids": torch.cat([IDS[:1, :4], said, IDS[:1, :4]], dim=1),
        "input_features": numbers(1, 20, 80),
        "input_features_mask": torch.ones(1, 80, dtype=torch.int64),
    }


def sound_wave(config: Any) -> dict[str, Any]:
    return {"input_values": numbers(1, 1, 160)}


def masked_ids(config: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def four_axes(config: Any) -> dict[str, Any]:
    positions = torch.stack([torch.arange(20) % n + torch.arange(20) // n for n in (20, 5, 3, 2)])
    return {"input_ids": IDS, "position_ids": positions[:, None].expand(4, 2, 20)}


def two_streams(config: Any) -> dict[str, Any]:
    return {"noise_embeds": numbers(1, 4, 64), "context_hidden_states": numbers(1, 12, 128, seed=1)}


# As FAMILIES; "folder:Class" where transformers does not export the class, "folder:Class:Config" where it is
# no PreTrainedModel.
BODIES: dict[str, Case] = {
    "gpt_neox": ("GPTNeoXModel", {**TEXT, "rotary_pct": 0.5}, ids),
    "gpt_neox_japanese": ("GPTNeoXJapaneseModel", {**TEXT, "intermediate_multiple_size": 1}, ids),
    "bamba": (
        "BambaModel",
        {**TEXT, "attn_layer_indices": [0, 1], "mamba_n_heads": 4, "mamba_d_head": 32},
        ids,
    ),
    "deepseek_v3": ("DeepseekV3Model", {**LATENT, "first_k_dense_replace": 2, "n_shared_experts": 1}, ids),
    "mistral_large4": ("mistral_large4:MistralLarge4TextModel", {**LATENT, "head_dim": 16}, ids),
    "deepseek_v4": (
        "DeepseekV4Model",
        {
            **TEXT,
            **MOE,
            "head_dim": 32,
            "q_lora_rank": 16,
            "n_routed_experts": 2,
            "layer_types": ["sliding_attention"] * 2,
            "mlp_layer_types": ["moe"] * 2,
            "o_groups": 2,
            "o_lora_rank": 16,
        },
        ids,
    ),
    "olmo2": ("Olmo2Model", TEXT, ids),
    "nemotron": ("NemotronModel", {**TEXT, "head_dim": 32}, ids),
    "ernie4_5": ("Ernie4_5Model", {**TEXT, "head_dim": 32}, ids),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextModel",
        {
            **TEXT,
            "moe_num_experts": 2,
            "moe_k": 2,
            "moe_intermediate_size": [32, 32],
            "mlp_layer_types": ["dense"] * 2,
            "rope_parameters": {**AXES, "mrope_section": [5, 5, 6]},
        },
        ids,
    ),
    "phimoe": ("PhimoeModel", {**TEXT, "num_local_experts": 2, "num_experts_per_tok": 2}, ids),
    "glm4v_moe": (
        "glm4v_moe:Glm4vMoeTextModel",
        {
            **TEXT,
            **MOE,
            "head_dim": 32,
            "n_routed_experts": 2,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        several_axes,
    ),
    "evolla": (
        "evolla:EvollaSaProtProteinEncoder:SaProtConfig",
        {**TEXT, "position_embedding_type": "rotary", "mask_token_id": 3},
        masked_ids,
    ),
    "qwen2_5_omni_vision": (
        "qwen2_5_omni:Qwen2_5OmniVisionEncoder:Qwen2_5OmniVisionEncoderConfig",
        {**VISION, "out_hidden_size": 64, "intermediate_size": 32, "fullatt_block_indexes": [0]},
        patches,
    ),
    "neomme": (
        "neomme:NeoMMEModel",
        {**TEXT, "head_dim": 32, "embedding_rank": 16, "embedding_dim": 16, "layer_types": TWO_KINDS},
        ids,
    ),
    "phi3": ("Phi3Model", TEXT, ids),
    "helium": ("HeliumModel", {**TEXT, "head_dim": 32}, ids),
    "hunyuan_vl": (
        "hunyuan_vl:HunYuanVLTextModel",
        {**TEXT, "head_dim": 32, "rope_parameters": {**AXES, "mrope_section": [4, 4, 4, 4]}},
        four_axes,
    ),
    "qwen4_exp": (
        "qwen4_exp:Qwen4ExpTextModel",
        {
            **TEXT,
            **MOE,
            "head_dim": 32,
            "num_experts": 2,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "indexed_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
        ids,
    ),
    "musicflamingo": (
        "MusicFlamingoModel",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "audio_config": {
                "model_type": "audioflamingo3_encoder",
                "num_mel_bins": 20,
                "hidden_size": 64,
                "d_model": 64,
                "num_hidden_layers": 1,
                "encoder_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_source_positions": 40,
            },
            "audio_token_id": 90,
            "head_dim": 32,
        },
        text_and_sound,
    ),
    "openai_privacy_filter": (
        "openai_privacy_filter:OpenAIPrivacyFilterModel",
        {**TEXT, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 2},
        ids,
    ),
    "clvp": ("clvp:ClvpEncoder:ClvpEncoderConfig", {**TINY, "vocab_size": 97, "projection_dim": 64}, ids),
    "pe_audio": (
        "pe_audio:PeAudioEncoder",
        {
            **TINY,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "dac_config": {
                "encoder_hidden_size": 8,
                "downsampling_ratios": [2, 2],
                "hidden_size": 32,
                "decoder_hidden_size": 8,
                "codebook_dim": 8,
            },
        },
        sound_wave,
    ),
    "qwen2_vl_vision": (
        "qwen2_vl:Qwen2VisionTransformerPretrainedModel:Qwen2VLVisionConfig",
        {**VISION, "embed_dim": 64, "hidden_size": 64},
        patches,
    ),
    "glmasr": ("glmasr:GlmAsrEncoder", {**TINY, "num_mel_bins": 20}, mel),
    "gemma4_vision": (
        "gemma4:Gemma4VisionModel",
        {**TINY, "num_key_value_heads": 2, "head_dim": 32, "position_embedding_size": 64},
        patches_at_positions,
    ),
    "minimax_m3_vl_vision": ("minimax_m3_vl:MiniMaxM3VLVisionModel", {**TINY, "image_size": 64}, patches),
    "inkling2_vision": (
        "inkling2:Inkling2VisionModel",
        {**TINY, "projection_hidden_dim": 32, "text_hidden_size": 32},
        merged_patches,
    ),
    "sapiens2": ("Sapiens2Model", {**TINY, "image_size": [64, 64], "patch_size": 16}, image),
    "sam3": (
        "sam3:Sam3ViTModel",
        {**TINY, "image_size": 64, "patch_size": 16, "window_size": 2, "pretrain_image_size": 64},
        image,
    ),
    "sam2_video": ("sam2_video:Sam2VideoMemoryAttention:Sam2VideoConfig", MEMORY, pictures_and_memory),
    "edgetam_video": (
        "edgetam_video:EdgeTamVideoMemoryAttention:EdgeTamVideoConfig",
        MEMORY,
        pictures_and_small_memory,
    ),
    "muse_glimmer_assistant": (
        "muse_glimmer_assistant:MuseGlimmerAssistantModel",
        {**TEXT, "head_dim": 32, "layer_types": ["full_attention"] * 2, "target_layer_ids": [0, 1]},
        two_streams,
    ),
    "seamless_m4t": (
        "seamless_m4t:SeamlessM4TSpeechEncoder",
        {
            "hidden_size": 64,
            "speech_encoder_intermediate_size": 32,
            "speech_encoder_layers": 1,
            "speech_encoder_attention_heads": 2,
            "feature_projection_input_dim": 20,
            "position_embeddings_type": "rotary",
            "add_adapter": False,
        },
        features,
    ),
}
