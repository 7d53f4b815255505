"""A rank of the parts of `tools/lab gpu` that train: a few steps of a guarded Llama."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import safe_rope
from laboratory.ranks import ds_config

STEPS = 3


def zero(stage: int) -> dict[str, Any]:
    """Return the losses of BF16 training by DeepSpeed, and whether the audit says ok."""
    model = _model()
    engine = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=ds_config(stage))[0]
    ids = torch.arange(64, device=engine.device)[None]
    losses = []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return {"losses": losses, "audit": safe_rope.audit(engine.module).ok}


def autocast(stage: int) -> dict[str, Any]:
    """Return by how much losses and gradients are off those of DDP under torch.autocast, as shares."""
    model = _model()
    alike = copy.deepcopy(model)
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": "auto"}
    # Without a value of its own DeepSpeed clips to a norm of 1.
    config = ds_config(stage) | {"bf16": {"enabled": False}, "gradient_clipping": 0.0}
    config["torch_autocast"] = autocast
    engine = safe_rope.initialize(model=model, optimizer=_optimizer(model), config=config)[0]
    ddp = DistributedDataParallel(alike.to(engine.device))
    optimizer = _optimizer(alike)
    ids = torch.arange(64, device=engine.device)[None]
    off = {"loss": 0.0, "gradients": 0.0}
    for _ in range(STEPS):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        with torch.autocast(engine.device.type, torch.bfloat16):
            other = ddp(input_ids=ids, labels=ids).loss
        other.backward()
        gradients = [p.grad for p in alike.parameters() if p.grad is not None]
        differences = [
            safe_get_full_grad(p).to(g.device) - g
            for p, g in zip(engine.module.parameters(), gradients, strict=True)
        ]
        share = torch.nn.utils.get_total_norm(differences) / torch.nn.utils.get_total_norm(gradients)
        off["loss"] = max(off["loss"], abs(float(loss / other) - 1))
        off["gradients"] = max(off["gradients"], float(share))
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    return off


def _model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with safe_rope.guard():
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))  # type: ignore[arg-type]


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def main(what: str, stage: int, device: str, out: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
    found = {"zero": zero, "autocast": autocast}[what](stage)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
