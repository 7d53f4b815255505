"""A rank of the ZeRO part of `tools/lab gpu`: two steps of a guarded Llama."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import safe_rope
from laboratory.zoo.worker import ds_config


def main(stage: int, device: str, out: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with safe_rope.guard():
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage))[0]
    losses = []
    ids = torch.arange(64, device=engine.device)[None]
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps({"losses": losses, "audit": safe_rope.audit(engine.module).ok}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
