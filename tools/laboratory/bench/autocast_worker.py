"""One rank of the measurement of autocast: what may travel in bfloat16, and what does in one step.

Usage: python -m laboratory.bench.autocast_worker RESULT.json, with the variables of a rank set.

``default`` is deepspeed.initialize with its default list of safe modules, ``derived`` safe_rope.initialize
with its default, "auto". Bytes are those of the second step, as safe_rope.autocast.traffic counts them.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import safe_rope
from safe_rope.autocast import derive_safe_parameters, traffic

# Any: what transformers' annotations say differs between the versions that this must run with.
transformers: Any = importlib.import_module("transformers")

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
BUCKET = 10_000
DEFAULT_LIST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Row = dict[str, Any]


def llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=128, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def mixtral(experts: str) -> Any:
    config = transformers.MixtralConfig(
        **SIZES, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )
    model = transformers.MixtralForCausalLM(config)
    if hasattr(model, "set_experts_implementation"):  # transformers before 5 has the loop only
        model.set_experts_implementation(experts)
    return model


MODELS = {
    "Llama": lambda: llama(tied=False),
    "Llama, tied": lambda: llama(tied=True),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "Mixtral, eager experts": lambda: mixtral("eager"),
    "Mixtral, batched_mm": lambda: mixtral("batched_mm"),
    "Mixtral, grouped_mm": lambda: mixtral("grouped_mm"),
}
TRAINED = ("Llama", "Llama, tied", "GPT-2", "Mixtral, eager experts")


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().float().train()


def batch(rank: int) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def shares(name: str) -> Row:
    """The shares of elements that are safe, that DeepSpeed's default list marks, and of these the unsafe."""
    model = build(name)
    started = time.perf_counter()
    report = derive_safe_parameters(model, **batch(0))
    seconds = time.perf_counter() - started
    listed = {
        id(parameter)
        for module in model.modules()
        if module.__class__ in DEFAULT_LIST
        for parameter in module.parameters(recurse=False)
    }
    names = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in names.values())
    marked = {name for name, parameter in names.items() if id(parameter) in listed}
    return {
        "model": name,
        "parameters": total,
        "derived": sum(names[n].numel() for n in names if n in report.safe) / total,
        "default": sum(names[n].numel() for n in marked) / total,
        "default_unsafe": sum(names[n].numel() for n in marked - report.safe) / total,
        "seconds": seconds,
        "warnings": list(report.warnings),
    }


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }


def initialize(model: Any, config: dict[str, Any], kind: str, **inputs: Any) -> Any:
    """Return the engine that deepspeed ("default") or safe_rope, which takes the inputs, makes of a model."""
    given = {"model": model, "model_parameters": model.parameters(), "config": config}
    if kind == "default":
        return deepspeed.initialize(**given)[0]
    return safe_rope.initialize(**given, **inputs)[0]


def bytes_of_a_step(name: str, stage: int, kind: str, rank: int) -> Row:
    """Train two steps and count the second."""
    model = build(name)
    inputs = batch(rank)
    engine = initialize(model, config(stage), kind, example_inputs=inputs)
    for _ in range(2):
        with traffic() as seen:
            engine.backward(engine(**inputs).loss)
            engine.step()
    engine.destroy()
    return {"model": name, "stage": stage, "kind": kind, "low": seen.bytes(torch.bfloat16)} | {
        "float32": seen.bytes(torch.float32),
        "rows": seen.to_dict()["rows"],
    }


def staging(stage: int, overlap: bool) -> Row:
    """Bytes of the buffers in which gradients wait, for each element of the bucket that was asked for."""
    row: Row = {"stage": stage, "overlap": overlap}
    for kind in ("default", "derived"):
        asked = config(stage)
        zero = {**asked["zero_optimization"], "reduce_bucket_size": BUCKET, "overlap_comm": overlap}
        model = build("Llama")
        engine = initialize(model, {**asked, "zero_optimization": zero}, kind)
        if stage < 3:  # which makes its buffers when the first gradient comes
            engine.optimizer.setup_buckets()
        buffers = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
        tensors = [t for buffer in buffers for t in (buffer if isinstance(buffer, list) else [buffer])]
        row[kind] = sum(t.nbytes for t in tensors) / BUCKET
        engine.destroy()
    return row


def main(result: Path) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    measured: list[Row] = []
    failures: list[str] = []
    for name in TRAINED:
        for stage in (2, 3):
            for kind in ("default", "derived"):
                try:
                    measured.append(bytes_of_a_step(name, stage, kind, rank))
                except Exception as error:  # one release's fault is a row, not the end
                    failures.append(f"{name}, ZeRO {stage}, {kind}: {type(error).__name__}: {error}")
                gc.collect()
    held = [staging(stage, overlap) for stage in (2, 3) for overlap in (False, True)]
    derived = [shares(name) for name in MODELS] if rank == 0 else []
    result.write_text(
        json.dumps({"shares": derived, "bytes": measured, "staging": held, "failures": failures})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
