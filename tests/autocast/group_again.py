"""On a rank: an engine, a new process group, and the next engine of the same model."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import nn

import safe_rope
from safe_rope.errors import PrecisionWarning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dummy_inputs = {"x": torch.ones(2, 16)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).float().square().mean()


def train(model: nn.Module) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = safe_rope.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(2):
        loss = engine(torch.ones(2, 16))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return float(loss.detach())


def main(result: str) -> None:
    deepspeed.init_distributed("gloo")
    model = Net()
    losses = [train(model)]
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = groups._WORLD_GROUP = None
    os.environ["MASTER_PORT"] = sys.argv[2]
    deepspeed.init_distributed("gloo")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PrecisionWarning)
        losses.append(train(model))
    said = [str(one.message) for one in told if issubclass(one.category, PrecisionWarning)]
    Path(result).write_text(json.dumps({"losses": losses, "said": said}))


if __name__ == "__main__":
    main(sys.argv[1])
