"""On a rank: steps of engines that send gradients as they arrive; ranks use the same parameters, or not."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import parity
import torch
from rank import join
from torch import nn
from torch.utils.checkpoint import checkpoint

import safe_rope
from safe_rope.errors import ConfigError

Batch = tuple[torch.Tensor, list[int]]


class Experts(nn.Module):
    """Sends what it is given to the layers that are chosen, in that order."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 16)
        self.kept = nn.Parameter(torch.ones(16), requires_grad=False)
        if kind == "tied":
            self.experts[1].weight = self.experts[0].weight
        if kind == "frozen":
            self.experts[1].requires_grad_(False)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        if self.kind == "batches of none":
            parts = [x if i in chosen else x[:0] for i in range(2)]
            done = [torch.tanh(e(part)) for e, part in zip(self.experts, parts, strict=True)]
            return (
                self.head(sum(nn.functional.pad(one, (0, 0, 0, 4 - len(one))) for one in done))
                .float()
                .square()
                .mean()
            )
        x = x.detach().requires_grad_()
        reentrant = {"reentrant": True, "checkpointing": False}.get(self.kind)
        done = [
            self.experts[i](x)
            if reentrant is None
            else checkpoint(self.experts[i], x, use_reentrant=reentrant)
            for i in chosen
        ]
        loss = self.head(sum(torch.tanh(one) for one in done)).float().square().mean()
        if self.kind == "zero times":
            loss = loss + 0 * sum(
                p.sum() for i in range(2) if i not in chosen for p in self.experts[i].parameters()
            )
        return loss


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which experts the ranks use: for each step, for each micro-batch, for each rank."""

    kind: str
    ways: list[list[list[list[int]]]]

    def batches(self) -> list[list[Batch]]:
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        return [[(torch.randn(4, 16, generator=generator), w[rank]) for w in step] for step in self.ways]


BOTH, FIRST, SECOND, OTHER, TURNED = [[0, 1]] * 2, [[0]] * 2, [[1]] * 2, [[0], [1]], [[0, 1], [1, 0]]
RIGHT = {
    "as they are": Plan("", [[BOTH]] * 3),
    "unused by all": Plan("", [[FIRST], [SECOND], [BOTH]]),
    "tied": Plan("tied", [[BOTH]] * 3),
    "frozen": Plan("frozen", [[BOTH]] * 3),
    "checkpointing": Plan("checkpointing", [[BOTH]] * 3),
    "reentrant": Plan("reentrant", [[BOTH]] * 3),
    "batches of none": Plan("batches of none", [[BOTH], [OTHER], [OTHER]]),
    "accumulation": Plan("", [[BOTH, FIRST], [FIRST, SECOND], [BOTH, BOTH]]),
}
WRONG = {
    "other experts": Plan("", [[BOTH], [OTHER]]),
    "zero times what is not used": Plan("zero times", [[BOTH], [OTHER]]),
    "another order": Plan("", [[BOTH], [TURNED]]),
    "other experts first": Plan("", [[BOTH, BOTH], [OTHER, BOTH]]),
}


def by_ddp(plan: Plan) -> dict[str, torch.Tensor]:
    model = Experts(plan.kind)
    optimizer = parity.new_optimizer(model)
    for step in plan.batches():
        for x, way in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x, way)
            (loss / len(step)).backward()
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                torch.distributed.all_reduce(p.grad)
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def weights(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    return {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}


def run(plan: Plan, **settings: Any) -> dict[str, Any]:
    """Train; say how far updates are off, or with what a step was refused and what it has changed."""
    data, model = plan.batches(), Experts(plan.kind)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    case = parity.Case("", "bfloat16", accumulation=len(data[0]), clip=False, reduce="fp32", **settings)
    inputs: dict[str, Any] = {"x": data[0][0][0], "chosen": [0, 1]}
    optimizer = parity.new_optimizer(model)
    engine = safe_rope.initialize(
        model=model, optimizer=optimizer, config=case.config(), example_inputs=inputs
    )[0]
    seen: dict[str, Any] = {"refused": ""}
    for step in data:
        engine.eval()
        with torch.no_grad():
            engine(*step[0])
        engine.train()
        for x, way in step:
            engine.backward(engine(x, way))
            before = weights(engine)
            try:
                engine.step()
            except ConfigError as error:
                seen["refused"] = str(error)
                seen["changed"] = [name for name, p in weights(engine).items() if not p.equal(before[name])]
    found = weights(engine)
    engine.destroy()
    if not seen["refused"]:
        truth = by_ddp(plan)
        seen["error"] = max(float((found[n] - p).norm() / (p - start[n]).norm()) for n, p in truth.items())
    return seen


def main(result: Path) -> None:
    join()
    alone = {"stage": 2, "overlap": False}
    ways = alone, {"stage": 2, "overlap": True}, {"stage": 1, "overlap": True}
    seen: dict[str, Any] = {"right": {}, "wrong": {}}
    for expected, plans in (("right", RIGHT), ("wrong", WRONG)):
        for name, plan in plans.items():
            more = [{"stage": 2, "contiguous": False}] if name in ("as they are", "another order") else []
            for settings in (*ways, *more):
                if parity.accumulation(settings["stage"]) < len(plan.ways[0]):
                    continue  # the installed DeepSpeed does it wrong, and is refused
                where = f"{name}, {settings}"
                # ZeRO 1 sends once, at the end of the last micro-batch.
                verdict = "right" if name == "other experts first" and settings["stage"] == 1 else expected
                seen[verdict][where] = run(plan, **settings)
                print(where, seen[verdict][where], flush=True)
    result.write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
