"""On a rank: float16 with an overflow at step 3, then on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import torch
from deepspeed.utils import safe_get_full_fp32_param

from safe_rope.autocast import _deepspeed

OVERFLOW = 2  # the third step
STEPS = 6


def weights(engine: Any) -> Any:
    """A sum over every FP32 master weight, exact enough to see any of them move."""
    parts = []
    for p in engine.module.parameters():
        full = safe_get_full_fp32_param(p)
        parts.append((p if full is None else full).detach().double().flatten())
    return torch.cat(parts)


def one(case: Any, folder: Path) -> dict[str, Any]:
    engine = parity.new_engine(case)
    rank = torch.distributed.get_rank()
    seen: dict[str, Any] = {"scales": [], "losses": [], "moved": []}
    before = weights(engine)
    for step in range(STEPS):
        # A loss that only one rank has overflow; all of them must skip the step.
        factor = float("inf") if step == OVERFLOW and rank == 1 else 1.0
        seen["scales"].append(parity.loss_scale(engine))
        seen["losses"].append(parity.train_step(engine, case, step, factor))
        engine.step()
        after = weights(engine)
        seen["moved"].append(bool((after != before).any()))
        seen["finite"] = bool(after.isfinite().all())
        before = after
    seen["skipped"] = engine.skipped_steps
    seen["after"] = parity.loss_scale(engine)

    engine.save_checkpoint(str(folder), tag=f"zero{case.stage}")
    torch.distributed.barrier()
    again = parity.new_engine(case)
    again.load_checkpoint(str(folder), tag=f"zero{case.stage}")
    seen["loaded"] = parity.loss_scale(again)
    seen["same weights"] = bool(torch.equal(weights(again), weights(engine)))
    losses = []
    for trained in (engine, again):
        losses.append([parity.train_step(trained, case, STEPS)])
        trained.step()
        losses[-1].append(parity.train_step(trained, case, STEPS + 1))
        trained.step()
    seen["goes on alike"] = losses[0] == losses[1]
    seen["growth"] = growth(again, case)
    for trained in (engine, again):
        trained.destroy()
    return seen


def growth(engine: Any, case: Any) -> list[float]:
    """The scale at each of six steps where it grows after every two steps without an overflow."""
    if case.stage == 0:
        scaler = engine.torch_autocast_z0_gradscaler
        scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 2, "_growth_tracker": 0})
    else:
        scaler = engine.optimizer.loss_scaler
        scaler.scale_window = 2
        scaler.cur_iter, scaler.last_overflow_iter = 0, -1
    scales = []
    for step in range(6):
        parity.train_step(engine, case, step)
        scales.append(parity.loss_scale(engine))
        engine.step()
    return scales


def run(folder: str) -> dict[str, Any]:
    # DeepSpeed 0.17 has no loss scale at ZeRO 0, and is refused there (test_preflight).
    seen = {}
    for stage in (0, 1, 2, 3) if _deepspeed.scales_without_zero() else (1, 2, 3):
        count = parity.accumulation(stage)
        case = parity.Case("llama", "float16", stage, count, clip=stage != 1, overlap=stage == 2)
        seen[str(stage)] = one(case, Path(folder))
    return seen
