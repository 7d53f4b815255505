"""Some steps of training by an engine, and the same by DDP with torch.autocast: what both measure."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import tiny_models
import torch
from torch import nn

from safe_rope.autocast import _deepspeed, releases
from safe_rope.errors import ConfigError

STEPS = 10
GRADS = {"bfloat16": 5e-3, "float16": 1e-3}  # relative to the whole gradient's norm: the rounding of the sum


def new_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """SGD: an update as large as the gradient, where Adam's would hide a wrong scale."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the engine.

    ``reduce`` is the config's communication_data_type. ``weights`` are float32, low (all trained in the
    autocast dtype) or lora (frozen in it, below FP32 adapters). ``zero`` is more of the config's section. By
    ``plan`` micro-batches are "no sync" (accumulated by the user), the last step's are "uneven" (one is all
    there is), weights are "edited" by rank 0 after the first step, or the engine is "built again" after it.
    """

    model: str
    dtype: str
    stage: int
    accumulation: int
    clip: bool
    contiguous: bool = True
    overlap: bool = False
    reduce: str | None = None
    weights: str = "float32"
    bucket: int = 50_000
    persistent: int = 0
    checkpointing: bool = False
    partitioned: bool = False
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan: str = ""

    @property
    def name(self) -> str:
        words = [self.model, self.dtype, f"ZeRO {self.stage}", f"accumulation {self.accumulation}"]
        words += [self.weights] * (self.weights != "float32")
        words += ["clip"] * self.clip + ["contiguous"] * self.contiguous + ["overlap"] * self.overlap
        words += ["checkpointing"] * self.checkpointing + ["partitioned"] * self.partitioned
        words += [self.plan] * bool(self.plan)
        words += [f"bucket {self.bucket}"] * (self.bucket != 50_000)
        words += [f"persistent {self.persistent}"] * (self.persistent > 0) + list(self.zero)
        return ", ".join(words + ([f"reduce {self.reduce}"] if self.reduce else []))

    def config(self, **changes: Any) -> dict[str, Any]:
        """The DeepSpeed config."""
        zero = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
            "contiguous_gradients": self.contiguous,
            "overlap_comm": self.overlap,
        }
        if self.stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": self.persistent,
                "stage3_prefetch_bucket_size": self.bucket,
            }
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1 if self.plan == "no sync" else self.accumulation,
            "gradient_clipping": 0.5 if self.clip else 0.0,
            "torch_autocast": {"enabled": True, "dtype": self.dtype},
            "zero_optimization": zero | self.zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **({"communication_data_type": self.reduce} if self.reduce else {}),
            **changes,
        }

    def build(self, partitioned: bool = False) -> Any:
        """Its model."""
        dtype = torch.float32 if self.weights == "float32" else getattr(torch, self.dtype)
        module = tiny_models.build(self.model, dtype, self.weights == "lora", partitioned)
        if self.checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        return module

    def micro_batches(self, step: int) -> int:
        """How many there are in a step."""
        return 1 if self.plan == "uneven" and step == STEPS - 1 else self.accumulation


def accumulation(stage: int) -> int:
    """Two steps, or one where the installed DeepSpeed does more of them wrong and is refused."""
    return 1 if releases.faults(_deepspeed.release(), stage, 2) else 2


def edit(parameter: nn.Parameter) -> None:
    """What rank 0 does to the weights of the head."""
    parameter.data.mul_(1.25)


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


def every_day(model: str, dtype: str) -> list[Case]:
    """All that covers the settings of a Llama in bfloat16; of others what their kind can change."""
    cases = covering(model, dtype)
    return cases if (model, dtype) == ("llama", "bfloat16") else [cases[2], cases[5]]


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


def reference(case: Case) -> Run:
    """DDP with torch.autocast, and GradScaler in float16; low weights have FP32 masters as with ZeRO."""
    rank, accumulation = torch.distributed.get_rank(), case.accumulation
    module = case.build()
    if case.weights == "lora":  # what peft keeps beside the adapters is a low copy
        for p in module.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
    ddp = nn.parallel.DistributedDataParallel(module, find_unused_parameters="mixtral" in case.model)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    masters = {n: nn.Parameter(p.detach().float()) if case.stage else p for n, p in trained.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.01)
    low = getattr(torch, case.dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=low == torch.float16)
    run = Run()
    for step in range(STEPS):
        total = 0.0
        micro_batches = case.micro_batches(step)
        for micro in range(micro_batches):
            ddp.require_backward_grad_sync = micro == micro_batches - 1
            with torch.autocast("cpu", dtype=low):
                loss = ddp(**tiny_models.batch(step, micro, rank)).loss / accumulation
            scaler.scale(loss).backward()
            total += float(loss.detach())
        run.losses.append(_mean(total))
        run.scales.append(scaler.get_scale())
        for name, p in trained.items():
            if p.grad is not None and p is not masters[name]:
                masters[name].grad, p.grad = p.grad.float(), None
        scaler.unscale_(optimizer)
        norm = torch.stack([p.grad.float().norm() for p in masters.values() if p.grad is not None]).norm()
        run.norms.append(float(norm))
        if not run.grads and torch.isfinite(norm):
            run.grads = {n: p.grad.clone() for n, p in masters.items() if p.grad is not None}
        if case.clip:
            nn.utils.clip_grad_norm_(masters.values(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(masters[name])
        if case.plan == "edited" and step == 0:
            edit(module.lm_head.weight)
    return run


def loss_scale(engine: Any) -> float:
    """The engine's loss scale now, whatever holds it."""
    if getattr(engine, "torch_autocast_z0_gradscaler", None) is not None:
        return float(engine.torch_autocast_z0_gradscaler.get_scale())
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return float(scaler.cur_scale) if scaler is not None else 1.0


def new_engine(case: Case, low_precision_gather: bool = True, module: Any = None, **changes: Any) -> Any:
    """The engine of ``case``, or of its ``module``, by safe_rope.initialize, with changes to its config."""
    import safe_rope

    if module is None:
        module = case.build(case.partitioned)
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
    count = case.micro_batches(step)
    for micro in range(count):
        if micro and case.plan != "no sync":
            engine.step()  # counts the micro-batch
        if case.plan == "uneven":
            engine.set_gradient_accumulation_boundary(micro == count - 1)
        local = case.plan == "no sync" and micro < count - 1
        with engine.no_sync() if local else contextlib.nullcontext():
            loss = engine(**tiny_models.batch(step, micro, rank)).loss
            total += float(loss.detach()) / case.accumulation
            scale = factor / case.accumulation if case.plan == "no sync" else factor
            engine.backward(loss * scale)
    return total


def train(case: Case) -> Run:
    """Train the engine of ``case``."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param

    engine = new_engine(case)
    names = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
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
        if case.plan == "built again" and step == 0:
            engine.destroy()
            engine = new_engine(case, module=engine.module)
        if case.plan == "edited" and step == 0:
            head = engine.module.lm_head.weight
            with deepspeed.zero.GatheredParameters(head, modifier_rank=0):
                if torch.distributed.get_rank() == 0:
                    edit(head)
            with deepspeed.zero.GatheredParameters(head):
                value = head.detach().clone()
            safe_set_full_fp32_param(head, value)  # else the next step brings the master weights back
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


def deviations(seen: dict[str, Any], case: Case) -> list[str]:
    """What of a comparison is more than rounding: the norm relative at each step, the loss, the gradients."""
    grads = GRADS[case.dtype] * (2 if case.weights == "low" else 1)
    bounds = {"norm": 1e-3, "loss": 5e-4, "grads": grads}
    # Summed in FP32, as adapters are, nothing is left but the order of the additions.
    adapters = case.weights == "lora" and case.reduce in (None, "fp32")
    if adapters or (case.reduce == "fp32" and case.stage < 3 and case.weights == "float32"):
        bounds = dict.fromkeys(bounds, 1e-6)
    said = [
        f"{name} is off by {seen[name]:.2e}, more than {bound:.0e}"
        for name, bound in bounds.items()
        if not seen[name] <= bound
    ]
    if seen["missing grads"]:
        said.append(f"no gradient of {seen['missing grads']}")
    if seen["skipped"] != seen["reference skipped"]:
        said.append(f"skipped {seen['skipped']}, the reference {seen['reference skipped']}")
    return said


def run(which: str, steps: int, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Say how far each case is of ``which`` (a function of this module) of pairs of model and dtype."""
    global STEPS
    seen: list[dict[str, Any]] = []
    before, STEPS = STEPS, steps
    for model, dtype in (pair for pair in pairs if pair[0] in tiny_models.MODELS):
        references: dict[Any, Run] = {}
        for case in globals()[which](model, dtype):
            key = case.accumulation, case.clip
            if key not in references:
                references[key] = reference(case)
            seen.append(judge(case, references[key]))
    STEPS = before
    return seen


def judge(case: Case, truth: Run | None = None) -> dict[str, Any]:
    """Train the case and compare it with DDP; a refusal that DeepSpeed is to blame for is no deviation."""
    one: dict[str, Any] = {"case": case.name, "dtype": case.dtype, "stage": case.stage, "reduce": case.reduce}
    try:
        trained = train(case)
    except ConfigError as error:
        said = str(error)
        return one | {"refused": said, "deviations": [] if "DeepSpeed" in said else [said]}
    one |= compare(trained, truth or reference(case))
    gc.collect()
    return one | {"deviations": deviations(one, case)}
