"""Some steps of training by an engine, and the same by DDP with torch.autocast: what both measure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import tiny_models
import torch
from torch import nn

STEPS = 10


def new_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """SGD: an update as large as the gradient, where Adam's would hide a wrong scale."""
    return torch.optim.SGD(module.parameters(), lr=0.01)


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the engine; ``reduce`` is the config's communication_data_type."""

    model: str
    dtype: str
    stage: int
    accumulation: int
    clip: bool
    contiguous: bool = True
    overlap: bool = False
    reduce: str | None = None

    @property
    def name(self) -> str:
        words = [self.model, self.dtype, f"ZeRO {self.stage}", f"accumulation {self.accumulation}"]
        words += ["clip"] * self.clip + ["contiguous"] * self.contiguous + ["overlap"] * self.overlap
        return ", ".join(words + ([f"reduce {self.reduce}"] if self.reduce else []))

    def config(self, **changes: Any) -> dict[str, Any]:
        """The DeepSpeed config."""
        zero = {
            "stage": self.stage,
            "reduce_bucket_size": 50_000,
            "allgather_bucket_size": 50_000,
            "contiguous_gradients": self.contiguous,
            "overlap_comm": self.overlap,
        }
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 50_000}
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.5 if self.clip else 0.0,
            "torch_autocast": {"enabled": True, "dtype": self.dtype},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **({"communication_data_type": self.reduce} if self.reduce else {}),
            **changes,
        }


def grid(model: str, dtype: str) -> Iterator[Case]:
    """Every combination."""
    for stage, accumulation, clip in itertools.product((0, 1, 2, 3), (1, 2), (False, True)):
        if stage == 0:
            yield Case(model, dtype, stage, accumulation, clip)
            continue
        for contiguous, overlap in itertools.product((True, False), repeat=2):
            yield Case(model, dtype, stage, accumulation, clip, contiguous, overlap)


def covering(model: str, dtype: str) -> list[Case]:
    """A few combinations in which every value meets every stage."""
    chosen = [
        Case(model, dtype, 1, 1, True, contiguous=False, overlap=False),
        Case(model, dtype, 1, 2, False, contiguous=True, overlap=True),
        Case(model, dtype, 2, 1, True, contiguous=False, overlap=True),
        Case(model, dtype, 2, 2, False, contiguous=True, overlap=False),
        Case(model, dtype, 3, 1, False, contiguous=True, overlap=False),
        Case(model, dtype, 3, 2, True, contiguous=False, overlap=True),
    ]
    if model == "llama":
        chosen += [
            Case(model, dtype, 0, 1, True),
            Case(model, dtype, 0, 2, False),
            Case(model, dtype, 2, 1, False, reduce="fp32"),
            Case(model, dtype, 3, 1, False, reduce="fp32"),
        ]
    return chosen


@dataclasses.dataclass
class Run:
    """What was measured: one number a step, and the gradients of the first step that was not skipped."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    grads: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def _mean(loss: float) -> float:
    value = torch.tensor([loss], dtype=torch.float64)
    torch.distributed.all_reduce(value)
    return float(value) / torch.distributed.get_world_size()


def reference(model: str, dtype: str, accumulation: int, clip: bool) -> Run:
    """DDP with torch.autocast, and GradScaler in float16."""
    rank = torch.distributed.get_rank()
    module = tiny_models.build(model)
    ddp = nn.parallel.DistributedDataParallel(module, find_unused_parameters="mixtral" in model)
    optimizer = new_optimizer(module)
    low = getattr(torch, dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=low == torch.float16)
    run = Run()
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            ddp.require_backward_grad_sync = micro == accumulation - 1
            with torch.autocast("cpu", dtype=low):
                loss = ddp(**tiny_models.batch(step, micro, rank)).loss / accumulation
            scaler.scale(loss).backward()
            total += float(loss.detach())
        run.losses.append(_mean(total))
        run.scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1e9)
        run.norms.append(float(norm))
        if not run.grads and torch.isfinite(norm):
            run.grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return run


def loss_scale(engine: Any) -> float:
    """The engine's loss scale now, whatever holds it."""
    if getattr(engine, "torch_autocast_z0_gradscaler", None) is not None:
        return float(engine.torch_autocast_z0_gradscaler.get_scale())
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return float(scaler.cur_scale) if scaler is not None else 1.0


def new_engine(case: Case, low_precision_gather: bool = True, **changes: Any) -> Any:
    """The engine of ``case`` by safe_rope.initialize, with changes to its config."""
    import safe_rope

    module = tiny_models.build(case.model)
    optimizer = new_optimizer(module)
    return safe_rope.initialize(
        model=module,
        optimizer=optimizer,
        example_inputs=tiny_models.batch(0, 0, 0),
        config=case.config(**changes),
        low_precision_gather=low_precision_gather,
    )[0]


def train_step(engine: Any, case: Case, step: int, factor: float = 1.0) -> float:
    """Forward and backward of every micro-batch of one step, with the loss times ``factor``."""
    rank = torch.distributed.get_rank()
    total = 0.0
    for micro in range(case.accumulation):
        if micro:
            engine.step()  # counts the micro-batch
        loss = engine(**tiny_models.batch(step, micro, rank)).loss
        total += float(loss.detach()) / case.accumulation
        engine.backward(loss * factor)
    return total


def train(case: Case) -> Run:
    """Train the engine of ``case``."""
    from deepspeed.utils import safe_get_full_grad

    engine = new_engine(case)
    names = {name: p for name, p in engine.module.named_parameters()}
    run = Run()
    for step in range(STEPS):
        total = train_step(engine, case, step)
        run.losses.append(_mean(total))
        scale = loss_scale(engine)
        run.scales.append(scale)
        grads = None
        if case.stage == 0 or not run.grads:
            grads = {name: safe_get_full_grad(p) for name, p in names.items()}
            grads = {name: g.float() / scale for name, g in grads.items() if g is not None}
        if case.stage == 0:
            assert grads is not None
            own = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()]))
            run.norms.append(float(own))
        engine.step()
        if case.stage > 0:
            run.norms.append(float(engine.get_global_grad_norm()))
        if grads and not run.grads and all(torch.isfinite(g).all() for g in grads.values()):
            run.grads = grads
    engine.destroy()
    return run


def compare(run: Run, truth: Run) -> dict[str, Any]:
    """How far a run is from the reference: what the tests hold to their bounds."""
    finite = [i for i, norm in enumerate(truth.norms) if norm < float("inf") and norm == norm]
    square = sum(
        float((run.grads[n].view(g.shape) - g).square().sum())
        for n, g in truth.grads.items()
        if n in run.grads
    )
    whole = sum(float(g.square().sum()) for g in truth.grads.values())
    return {
        "norm": max(abs(run.norms[i] / truth.norms[i] - 1) for i in finite),
        "loss": max(abs(a - b) for a, b in zip(run.losses, truth.losses, strict=True)),
        "grads": (square / whole) ** 0.5,
        "missing grads": sorted(truth.grads.keys() - run.grads.keys()),
        "skipped": [i for i in range(STEPS) if not run.norms[i] < float("inf")],
        "reference skipped": [i for i in range(STEPS) if i not in finite],
        "first": [run.losses[0], run.norms[finite[0]]],
        "scales": run.scales,
    }
