"""One rank of the walk. Usage: python -m laboratory.autocast_fuzz.worker SEED COUNT OUTPUT, as a rank."""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

# Of tests/autocast, on the path that the command gives.
parity: Any = importlib.import_module("parity")
STEPS = 3
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def draw(random: random.Random) -> Any:
    """Draw a case."""
    stage = random.choice((0, 1, 2, 2, 3, 3))
    dtype = random.choice(("bfloat16", "bfloat16", "float16"))
    weights = random.choice(("float32", "float32", "lora", "low"))
    return parity.Case(
        model=random.choice(("llama", "llama tied", "gpt2", "mixtral eager")),
        dtype=dtype,
        stage=stage,
        accumulation=random.choice((1, 2, 3)),
        clip=random.random() < 0.5,
        contiguous=random.random() < 0.7,
        overlap=stage > 0 and random.random() < 0.5,
        reduce=random.choice((None, None, "fp32", {"bfloat16": "bf16", "float16": "fp16"}[dtype])),
        weights=weights,
        bucket=random.choice((2_000, 20_000, 50_000, 1_000_000)),
        persistent=random.choice((0, 100, 5_000, 100_000)) if stage == 3 else 0,
        checkpointing=random.random() < 0.3,
        partitioned=stage == 3 and random.random() < 0.5,
        zero=OFFLOAD if stage > 0 and random.random() < 0.15 else {},
    )


def main(seed: int, count: int, output: Path) -> None:
    importlib.import_module("rank").join()
    parity.STEPS = STEPS
    choice = random.Random(seed)
    rows = []
    for _ in range(count):
        case = draw(choice)
        started = time.monotonic()
        try:
            seen = parity.judge(case)
            if "refused" in seen:
                seen["deviations"] = []
        except Exception as error:
            seen = {"deviations": [f"{type(error).__name__}: {error}"]}
        row = {
            name: seen[name] for name in ("refused", "norm", "loss", "grads", "deviations") if name in seen
        }
        rows.append({"case": case.name, **row, "seconds": round(time.monotonic() - started, 2)})
        if torch.distributed.get_rank() == 0:
            output.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
