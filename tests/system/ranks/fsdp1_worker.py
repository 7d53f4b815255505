"""FSDP1 with mixed precision on one gloo rank. Run as ``fsdp1_worker.py OUTPUT PORT``.

OUTPUT gets, for each kind of model and each policy, what the stock model and the guarded one did: the dtype
of the logits and their distance from the stock model's in FP32, or the error that was raised.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.small_models import KINDS, build, logits, tokens
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

import safe_rope

BF16 = torch.bfloat16
POLICIES = {
    "parameters and buffers": MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
    "parameters": MixedPrecision(param_dtype=BF16),
    "buffers": MixedPrecision(buffer_dtype=BF16),
}


def outcome(kind: str, policy: MixedPrecision, guarded: bool) -> dict[str, Any]:
    true = logits(build(kind)(tokens())).detach()
    if guarded:
        with safe_rope.guard():
            model = build(kind)
    else:
        model = build(kind)
    try:
        wrapped = FullyShardedDataParallel(
            model, mixed_precision=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        for _ in range(2):
            result = logits(wrapped(tokens()))
            result.float().square().mean().backward()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    distance = (result.detach().float() - true).abs().max() / true.abs().max()
    return {"dtype": str(result.dtype), "distance": float(distance)}


def main(output: str, port: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    found = {
        f"{kind}, {name}": {
            who: outcome(kind, policy, guarded) for who, guarded in (("stock", False), ("guarded", True))
        }
        for kind in KINDS
        for name, policy in POLICIES.items()
    }
    Path(output).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
