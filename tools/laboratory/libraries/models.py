"""Small whole models of every library but diffusers, which has a file of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from laboratory.libraries.subject import FEW, Cast, Family, Subject, floats, ints, lib

TOKENS = 100


def _tokens(m: Any, to: Cast) -> Any:
    return m(ints(TOKENS, 1, FEW))


def x_transformers() -> list[Subject]:
    """A decoder or an encoder for each way of adding positions."""
    of = Family("x-transformers", "x_transformers", whole=True)

    def wrapped(kind: str, outside: dict[str, Any], **options: Any) -> Callable[[Any], Any]:
        def build(x: Any) -> Any:
            layers = getattr(x, kind)(dim=64, depth=2, heads=4, attn_dim_head=32, **options)
            return x.TransformerWrapper(num_tokens=TOKENS, max_seq_len=256, attn_layers=layers, **outside)

        return build

    decoders: dict[str, dict[str, Any]] = {
        "rotary": {"rotary_pos_emb": True},
        "rotary, flash": {"rotary_pos_emb": True, "attn_flash": True},
        "rotary, interpolated": {"rotary_pos_emb": True, "rotary_interpolation_factor": 4.0},
        "XPos": {"rotary_xpos": True, "rotary_pos_emb": True},
        "polar": {"polar_pos_emb": True},
        "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
        "dynamic position bias": {"dynamic_pos_bias": True},
        "dynamic position bias, log": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True},
        "relative position bias": {"rel_pos_bias": True},
    }
    encoders: dict[str, dict[str, Any]] = {"sinusoids": {"scaled_sinu_pos_emb": True}, "learned": {}}
    builds = {
        f"Decoder, {name}": wrapped("Decoder", {"use_abs_pos_emb": False}, **options)
        for name, options in decoders.items()
    }
    builds |= {f"Encoder, {name}": wrapped("Encoder", outside) for name, outside in encoders.items()}
    return [of(name, build, _tokens) for name, build in builds.items()]


def fair_esm() -> list[Subject]:
    """ESM-2 with rotary, ESM-1 with sinusoids, ESM-1b and the MSA transformer with learned positions."""

    def alphabet(name: str) -> Any:
        return lib("esm.data").Alphabet.from_architecture(name)

    def settings(**options: Any) -> argparse.Namespace:
        usual = {"layers": 2, "num_layers": 2, "embed_dim": 64, "ffn_embed_dim": 128, "attention_heads": 4}
        usual |= dict.fromkeys(("max_tokens", "max_tokens_per_msa"), 1 << 14) | {"max_positions": 256}
        dropouts = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
        flags = {"embed_positions_msa": True, "final_bias": True}
        return argparse.Namespace(**usual, **dropouts, **flags, **options)

    def residues(m: Any, to: Cast) -> Any:
        return m(ints(20, 1, FEW) + 4)["logits"]

    def alignment(m: Any, to: Cast) -> Any:
        return m(ints(20, 1, 4, FEW) + 4)["logits"]

    one = Family("fair-esm", "esm.model.esm1", whole=True)
    two = Family("fair-esm", "esm.model.esm2", whole=True)
    msa = Family("fair-esm", "esm.model.msa_transformer", whole=True)
    return [
        two("ESM2", lambda x: x.ESM2(2, 64, 4, alphabet("ESM-1b"), token_dropout=False), residues),
        one(
            "ESM-1",
            lambda x: x.ProteinBertModel(settings(arch="protein_bert_base"), alphabet("protein_bert_base")),
            residues,
        ),
        one(
            "ESM-1b",
            lambda x: x.ProteinBertModel(
                settings(arch="roberta_large", token_dropout=False), alphabet("roberta_large")
            ),
            residues,
        ),
        msa(
            "MSATransformer",
            lambda x: x.MSATransformer(settings(arch="msa_transformer"), alphabet("msa_transformer")),
            alignment,
        ),
    ]


def litgpt() -> list[Subject]:
    """The architectures of litgpt that differ in their positions."""
    of = Family("litgpt", "litgpt", whole=True)
    small = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "head_size": 16,
        "intermediate_size": 96,
        "vocab_size": TOKENS,
        "padded_vocab_size": 128,
        "block_size": 256,
    }
    yarn = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 64}
    configs: dict[str, dict[str, Any]] = {
        "pythia-14m": {},
        "Llama-2-7b-hf": {"n_query_groups": 4},
        "Llama-3.1-8B": {"n_query_groups": 2},
        "Gemma-2-2b": {"n_query_groups": 2},
        "Gemma-3-1b-it": {"n_query_groups": 1},
        "phi-2": {},
        "falcon-7b": {"n_query_groups": 1},
        "Mistral-7B-v0.3": {"n_query_groups": 2},
        "OLMo-2-1124-7B": {"n_query_groups": 4},
        "Qwen3-0.6B": {"n_query_groups": 2},
        "LLaMA-2-7B-32K": {"n_query_groups": 4},
        "Qwen2.5-0.5B": {"n_query_groups": 2, "rope_adjustments": yarn},
    }

    def gpt(name: str, options: dict[str, Any]) -> Callable[[Any], Any]:
        return lambda x: x.GPT(x.Config.from_name(name, **small, **options))

    return [
        of(name + (" with Yarn" if "rope_adjustments" in options else ""), gpt(name, options), _tokens)
        for name, options in configs.items()
    ]


def timm() -> list[Subject]:
    """Vision transformers with tables of positions."""
    of = Family("timm", "timm", whole=True)
    stages = {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1)}
    swin = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    sized = {"embed_dim": 48, "depth": 2, "num_heads": 3}
    plain = {"img_size": 64, **sized}
    models: dict[str, dict[str, Any]] = {
        "swinv2_tiny_window8_256": {**swin, "window_size": 4},
        "swinv2_cr_tiny_224": {**swin, "window_size": (4, 4)},
        "maxvit_rmlp_pico_rw_256": {**stages, "stem_width": (8, 16)},
        "maxvit_tiny_tf_224": {**stages, "stem_width": 8},
        "coatnet_rmlp_0_rw_224": {
            "img_size": 64,
            "embed_dim": (32, 32, 32, 64),
            "depths": (1, 1, 1, 1),
            "stem_width": (8, 16),
        },
        "eva02_tiny_patch14_224": {**plain, "img_size": 56},
        "beit_base_patch16_224": plain,
        "vit_base_patch16_rope_224": plain,
        "vit_base_patch16_rope_mixed_224": plain,
        "vit_small_patch16_dinov3": plain,
        "vit_pe_core_tiny_patch16_384": plain,
        "vit_relpos_small_patch16_224": plain,
        "qwen3_vit_88m": plain,
        "deepseek_vit_412m": {**plain, "img_size": 56},
        "gemma4_vit_167m": plain,
        "naflexvit_base_patch16_gap": sized,
        "naflexvit_base_patch16_siglip": sized,
        "naflexvit_base_patch16_gap, rotary": {**sized, "rope_type": "axial", "pos_embed": "none"},
        "xcit_nano_12_p16_224": {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "edgenext_xx_small": {"dims": (16, 24, 32, 48), "depths": (1, 1, 2, 1)},
        "samvit_base_patch16": {**plain, "window_size": 2, "global_attn_indexes": (1,)},
    }

    def model(name: str, options: dict[str, Any]) -> Callable[[Any], Any]:
        return lambda x: x.create_model(name.partition(",")[0], num_classes=10, **options)

    def picture(size: int) -> Callable[[Any, Cast], Any]:
        return lambda m, to: m(to(floats(1, 3, size, size)))

    return [
        of(name, model(name, options), picture(options.get("img_size", 64)))
        for name, options in models.items()
    ]


def open_clip() -> list[Subject]:
    """CLIP with a tower of its own, with EVA-02 and with a ViT that rotates on two axes; CoCa."""
    of = Family("open_clip_torch", "open_clip", whole=True)
    text = {"context_length": 16, "vocab_size": TOKENS, "width": 32, "heads": 2, "layers": 2}
    own = {"image_size": 32, "patch_size": 8, "layers": 2, "width": 64, "head_width": 16}
    shaped = {"nonscalar_logit_scale": True}  # DeepSpeed takes no parameter without a dimension
    rotary = {
        "survey_eva02": ("eva02_tiny_patch14_224", {"img_size": 56}),
        "survey_rope": ("vit_base_patch16_rope_224", {"img_size": 64}),
        "survey_pe": ("vit_pe_core_tiny_patch16_384", {"img_size": 64}),
    }

    def register(name: str) -> str:
        """Give a timm model of a small size a name, which is all that open_clip passes on."""
        entry, size = rotary[name]

        def make(pretrained: bool = False, **options: Any) -> Any:
            return lib("timm").create_model(
                entry, **{"embed_dim": 48, "depth": 2, "num_heads": 3} | size | options
            )

        registry = lib("timm.models._registry")
        registry._model_entrypoints[name] = make
        return name

    def towers(name: str) -> Callable[[Any], Any]:
        def build(x: Any) -> Any:
            pool = "map" if name == "survey_pe" else "token"
            vision = {"timm_model_name": register(name), "timm_pool": pool, "timm_proj": "linear"}
            return x.CustomTextCLIP(32, vision, text, **shaped)

        return build

    def both(size: int) -> Callable[[Any, Cast], Any]:
        return lambda m, to: m(to(floats(1, 3, size, size)), ints(TOKENS, 1, 16))

    coca = {**text, "embed_cls": True, "output_tokens": True}
    decoder = {"context_length": 16, "vocab_size": TOKENS, "width": 32, "heads": 2, "layers": 2}
    return [
        of.new("CLIP", both(32), 32, own, text, **shaped),
        of.new("CLIP, sinusoids", both(32), 32, {**own, "pos_embed_type": "sin_cos_2d"}, text, **shaped),
        of("CustomTextCLIP, EVA-02", towers("survey_eva02"), both(56)),
        of("CustomTextCLIP, rotary ViT", towers("survey_rope"), both(64)),
        of("CustomTextCLIP, PE-Core", towers("survey_pe"), both(64)),
        of(
            "CoCa",
            lambda x: lib("open_clip.coca_model").CoCa(
                32, decoder, coca, {**own, "attentional_pool": True, "output_tokens": True}, **shaped
            ),
            both(32),
        ),
    ]


def torchtitan() -> list[Subject]:
    """Debug models of torchtitan, two layers of each, with attention that runs on CPU."""
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "llama3": ("llama3_configs", {}),
        "qwen3": ("qwen3_configs", {}),
        "deepseek_v3": ("deepseekv3_configs", {"moe_comm_backend": "standard"}),
    }

    def build(name: str) -> Callable[[Any], Any]:
        table, options = configs[name]

        def make(x: Any) -> Any:
            config = getattr(x, table)["debugmodel"](attn_backend="flex", **options)
            config.layers = config.layers[:2]
            attention = lib("torchtitan.models.common.attention").ScaledDotProductAttention
            for layer in config.layers:
                layer.attention.inner_attention = attention.Config()
            return config.build()

        return make

    def positions(m: Any, to: Cast) -> Any:
        return m(ints(TOKENS, 1, FEW), positions=ints(2048, 1, FEW))

    return [
        Family("torchtitan", f"torchtitan.models.{name}", whole=True, positions=2048)(
            name, build(name), positions
        )
        for name in configs
    ]


def megatron() -> list[Subject]:
    """A small GPT with the layers that need no other library."""
    of = Family("megatron-core", "megatron.core.models.gpt.gpt_model", whole=True)

    def config(**options: Any) -> Any:
        return lib("megatron.core.transformer.transformer_config").TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            use_cpu_initialization=True,
            perform_initialization=True,
            masked_softmax_fusion=False,
            **options,
        )

    def gpt(**options: Any) -> Callable[[Any], Any]:
        def build(x: Any) -> Any:
            _single_rank()
            spec = lib("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
            return x.GPTModel(
                config(),
                spec,
                vocab_size=128,
                max_sequence_length=256,
                position_embedding_type="rope",
                **options,
            )

        return build

    def causal(m: Any, to: Cast) -> Any:
        mask = torch.ones(1, 1, FEW, FEW, dtype=torch.bool).triu(1)
        return m(ints(TOKENS, 1, FEW), torch.arange(FEW)[None], mask)

    return [
        of("GPTModel, rotary", gpt(), causal),
        of("GPTModel, interpolated", gpt(seq_len_interpolation_factor=4.0), causal),
        of("GPTModel, Llama 3", gpt(rope_scaling=True), causal),
    ]


def _single_rank() -> None:
    """Megatron builds no model without groups of ranks, and runs none without a tracker of generators."""
    dist = lib("torch.distributed")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = lib("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel()
        lib("megatron.core.tensor_parallel.random").initialize_rng_tracker(inference_rng_tracker=True)
