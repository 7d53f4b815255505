"""On a rank: steps in which each rank uses other parameters, by an engine and by DDP.

The engine is at ZeRO 1, or reduces once for all micro-batches of a step, at ZeRO 1 and 2.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import parity
import torch
from rank import join
from torch import nn

import safe_rope


class Experts(nn.Module):
    """Sends what it is given to one of two layers, or to both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return self.head(sum(torch.tanh(self.experts[i](x)) for i in chosen)).float().square().mean()


def batches(rank: int, accumulation: int) -> list[list[tuple[torch.Tensor, list[int]]]]:
    """For each step its micro-batches: the last one of the first two steps goes to one expert of a rank."""
    generator = torch.Generator().manual_seed(rank)
    ways = [[[rank]] * accumulation, [[0, 1]] * (accumulation - 1) + [[1 - rank]], [[0, 1]] * accumulation]
    return [[(torch.randn(4, 16, generator=generator), way) for way in step] for step in ways]


def by_ddp(data: list[list[tuple[torch.Tensor, list[int]]]]) -> dict[str, torch.Tensor]:
    model = Experts()
    whole = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = parity.new_optimizer(model)
    for step in data:
        for micro, (x, way) in enumerate(step, 1):
            whole.require_backward_grad_sync = micro == len(step)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = whole(x, way)
            (loss / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def by_engine(
    data: list[list[tuple[torch.Tensor, list[int]]]], stage: int = 1, coalesced: bool = False
) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    model = Experts()
    accumulation = 1 if coalesced else len(data[0])
    case = parity.Case("", "bfloat16", stage, accumulation, False, overlap=stage == 2, reduce="fp32")
    inputs: dict[str, Any] = {"x": data[0][0][0], "chosen": [0, 1]}
    optimizer = parity.new_optimizer(model)
    engine = safe_rope.initialize(
        model=model, optimizer=optimizer, config=case.config(), example_inputs=inputs
    )[0]
    for step in data:
        with engine.coalesce_grad_reduction() if coalesced else contextlib.nullcontext():
            for x, way in step:
                engine.backward(engine(x, way) / (len(step) if coalesced else 1))
                if not coalesced:
                    engine.step()
        if coalesced:
            engine.step()
    weights = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return weights


def main(result: Path) -> None:
    import deepspeed

    join()
    data = batches(torch.distributed.get_rank(), parity.accumulation(1))
    start = {name: p.detach() for name, p in Experts().named_parameters()}
    truth, ways = by_ddp(data), {"": by_engine(data)}
    if hasattr(deepspeed.DeepSpeedEngine, "coalesce_grad_reduction"):
        ways |= {f"coalesced, ZeRO {stage}: ": by_engine(data, stage, coalesced=True) for stage in (1, 2)}
    errors = {
        way + n: float((found[n] - truth[n]).norm() / (truth[n] - start[n]).norm())
        for way, found in ways.items()
        for n in truth
    }
    print(errors)
    result.write_text(json.dumps(errors), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
