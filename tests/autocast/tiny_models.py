"""The models of the autocast tests, and their batches. Importable without deepspeed."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 256
# Before transformers 5 the experts are a loop, and nothing else.
HAS_EXPERT_CHOICE = hasattr(transformers.PreTrainedModel, "set_experts_implementation")
ONE_ROW = {"train_micro_batch_size_per_gpu": 1}
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **COMMON,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(**LLAMA, intermediate_size=128, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        **COMMON, n_embd=64, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def _mixtral(experts: str, layers: int = 2) -> Any:
    experts_of_a_layer = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(
        **LLAMA | {"num_hidden_layers": layers} | experts_of_a_layer,
        intermediate_size=96,
        tie_word_embeddings=False,
    )
    model = transformers.MixtralForCausalLM(config)
    if HAS_EXPERT_CHOICE:
        model.set_experts_implementation(experts)
    return model


MODELS = {
    "llama": lambda: _llama(tied=False),
    "llama tied": lambda: _llama(tied=True),
    "gpt2": _gpt2,
    "mixtral eager": lambda: _mixtral("eager"),
}
if HAS_EXPERT_CHOICE:
    # PyTorch's batched product is slow on CPU in float16.
    MODELS["mixtral batched"] = lambda: _mixtral("batched_mm", layers=1)


LORA_TARGETS = {"gpt2": ["c_attn"]}  # peft knows the others' attention by these names


def build(
    name: str, dtype: torch.dtype = torch.float32, lora: bool = False, partitioned: bool = False
) -> Any:
    """The model of that name, the same on every rank.

    Args:
        name: of `MODELS`.
        dtype: of its parameters.
        lora: all of these are frozen below FP32 adapters, beside an FP32 copy of the head that is trained.
        partitioned: by ZeRO 3, before the adapters are made.

    """
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).train()
    if partitioned:
        import deepspeed

        deepspeed.zero.Init(module=model, config_dict_or_path={"zero_optimization": {"stage": 3}, **ONE_ROW})
    if not lora:
        return model
    import peft

    targets = LORA_TARGETS.get(name, ["q_proj", "v_proj"])
    saved = ["lm_head"] if "tied" not in name and name != "gpt2" else None
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def batch(step: int, micro_step: int, rank: int) -> dict[str, Any]:
    """Token ids [4, 24] that differ between steps, micro-steps and ranks."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + rank)
    ids = torch.randint(3, VOCABULARY, (4, 24), generator=generator)
    return {"input_ids": ids, "labels": ids, "use_cache": False}
