"""On a rank: steps with a penalty on the weights outside of the model's forward, beside DDP."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rank import join
from test_losses import IDS, Net, loss_of, new_engine, penalty
from torch import nn

from safe_rope.errors import PrecisionError, PrecisionWarning

STEPS = 4
SHARE = 0.05
CASES: dict[str, Any] = {
    "none": lambda step, rank: False,
    "both ranks": lambda step, rank: True,
    "one rank": lambda step, rank: rank == 1,
    "later": lambda step, rank: step >= 2,
}


def loss(model: Any, weights: nn.Module, reads: bool) -> torch.Tensor:
    found = loss_of(model(IDS))
    return found + SHARE * penalty(weights) if reads else found


def by_ddp(reads: Any) -> dict[str, torch.Tensor]:
    model = Net()
    whole = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = loss_of(whole(IDS))
        if reads(step, torch.distributed.get_rank()):
            found = found + SHARE * penalty(model)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def by_engine(stage: int, reads: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    engine = new_engine(Net(), stage)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PrecisionWarning)
        for step in range(STEPS):
            engine.backward(loss(engine, engine.module, reads(step, torch.distributed.get_rank())))
            engine.step()
    said = [str(one.message) for one in told if issubclass(one.category, PrecisionWarning)]
    try:
        engine.module.state_dict()
        rounded = False
    except PrecisionError:
        rounded = True
    weights = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return {"said": said, "rounded": rounded, "weights": weights}


def refused(stage: int) -> dict[str, Any]:
    """A penalty in the second step, where the warning is an error."""
    engine = new_engine(Net(), stage)
    engine.backward(loss(engine, engine.module, reads=False))
    engine.step()
    seen: dict[str, Any] = {"error": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        try:
            engine.backward(loss(engine, engine.module, reads=True))
        except PrecisionWarning as error:
            seen["error"] = str(error)
    seen["no gradient"] = all(p.grad is None for p in engine.module.parameters())
    engine.destroy()
    return seen


def main(result: Path) -> None:
    join()
    seen: dict[str, Any] = {}
    for stage in (1, 2):
        one = seen[str(stage)] = {"refused": refused(stage)}
        for name, reads in CASES.items():
            found = by_engine(stage, reads)
            weights, truth, start = found.pop("weights"), by_ddp(reads), dict(Net().named_parameters())
            errors = [(weights[n] - truth[n]).norm() / (truth[n] - start[n]).norm() for n in truth]
            one[name] = {**found, "error": float(max(errors))}
    print(json.dumps(seen))
    result.write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
