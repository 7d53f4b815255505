"""The ways that a model is loaded: each is run in a separate process, and audited after every step.

Private names of DeepSpeed and transformers that this needs are all here.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safe_rope._audit.command.dump import save
from safe_rope._audit.command.job import DTYPES, Job, stage_of
from safe_rope._audit.command.skeleton import Skeleton
from safe_rope._audit.layers import add_layers
from safe_rope._audit.model import audit
from safe_rope._audit.report import AuditReport, Finding, Where
from safe_rope._audit.wrappers import unwrapped
from safe_rope._base.dtypes import dtype_name
from safe_rope._protection import guard
from safe_rope.errors import ConfigError, IncompatibleVersionError

Step = tuple[Where | None, nn.Module]
"""What was done to the model since the last step, where that alone says it, and the model."""

Paths = dict[str, Callable[["Material"], Iterator[Step]]]


@dataclass
class Material:
    """What every path starts from.

    Attributes:
        skeleton: the small model's config.
        model_class: the class of the small model.
        checkpoint: a folder with the small model as transformers saved it in FP32.
        deepspeed: a DeepSpeed config with the asked stage and dtypes, and nothing that a small model on
            one CPU cannot do; or None.
        dtype: what the model is loaded in.
    """

    skeleton: Skeleton
    model_class: Any
    checkpoint: Path
    deepspeed: dict[str, Any] | None
    dtype: torch.dtype

    @classmethod
    def prepare(cls, job: Job, folder: Path) -> Material:
        """Build the small model once, with nothing in its way, and save it to ``folder``."""
        skeleton = Skeleton(job.model)
        model: Any = skeleton.build()
        model.save_pretrained(folder)
        deepspeed = None if job.deepspeed is None else runnable(job.deepspeed, job.dtype)
        return cls(skeleton, type(model), folder, deepspeed, getattr(torch, job.dtype))


def implied(material: Material) -> Paths:
    """The paths that the DeepSpeed config implies by what a user calls them, the most harmful one first.

    Each yields the model after each step. What comes before the first yield is loading, and runs inside the
    guard; a guard is closed by the time of the next step.
    """
    if material.deepspeed is None:
        paths: Paths = {"from_pretrained": _from_pretrained}
    elif material.deepspeed["zero_optimization"]["stage"] == 3:
        paths = {
            "zero.Init, initialize": _zero_init,
            "ZeRO-3 from_pretrained, initialize": _zero3_from_pretrained,
        }
    else:
        paths = {"from_pretrained, initialize": _initialized}
    if material.dtype != torch.float32:
        paths[f"from_pretrained, .to({dtype_name(material.dtype)})"] = _cast
    return paths


# ---- the paths -----------------------------------------------------------------------------------------


def _from_pretrained(material: Material) -> Iterator[Step]:
    yield None, _load(material, material.dtype)


def _initialized(material: Material) -> Iterator[Step]:
    yield None, (model := _load(material, material.dtype))
    yield "initialize", _engine(model, material)


def _zero_init(material: Material) -> Iterator[Step]:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(material.deepspeed)):
        model = material.model_class(copy.deepcopy(material.skeleton.config))
    yield None, model
    yield "initialize", _engine(model, material)


def _zero3_from_pretrained(material: Material) -> Iterator[Step]:
    integration = importlib.import_module("transformers.integrations")
    # transformers holds it weakly: it must live until the model is loaded.
    config = integration.HfDeepSpeedConfig(copy.deepcopy(material.deepspeed))
    model = _load(material, material.dtype)
    del config
    yield None, model
    yield "initialize", _engine(model, material)


def _cast(material: Material) -> Iterator[Step]:
    yield None, (model := _load(material, torch.float32))
    yield "module cast", model.to(material.dtype)


def _load(material: Material, dtype: torch.dtype) -> nn.Module:
    # Its name since transformers 4.56 is dtype; every release takes the old one.
    model: nn.Module = material.model_class.from_pretrained(material.checkpoint, torch_dtype=dtype)
    return model


def _engine(model: nn.Module, material: Material) -> nn.Module:
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = copy.deepcopy(material.deepspeed)
    engine: nn.Module = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine


# ---- measuring one -------------------------------------------------------------------------------------


def measure_path(job: Job, material: Material, path: str, kind: str, dump: Path | None) -> AuditReport:
    """Return the audit after the last step of the path; findings say which step did it.

    To be called in a separate process. The model's tables are written to ``dump``.
    """
    if material.deepspeed is not None:
        start_deepspeed()
    announced = material.skeleton.announced
    steps = implied(material)[path](material)
    with guard() if kind == "guarded" else contextlib.nullcontext():
        first = next(steps)
    audits: list[tuple[Where | None, AuditReport]] = []
    for step, loaded in itertools.chain([first], steps):
        model = unwrapped(loaded)[0]  # paths stay the same whatever the engine
        audits.append((step, audit(model, job.measured(announced))))
    if dump is not None:
        tables = audit(model, job.dumped(announced)).tables
        add_layers(tables, material.skeleton.whole)
        save(dump, {f"{path} ({kind})": tables}, job.name)
    report = audits[-1][1]
    report.tables = {}  # it is sent to another process
    report.findings = [
        replace(f, where=_origin(f, audits)) if f.severity == "damaged" else f for f in report.findings
    ]
    return report


def _origin(finding: Finding, audits: list[tuple[Where | None, AuditReport]]) -> Where | None:
    """The step after which the damage is there; where that one only loads, what the damage itself tells."""
    for step, report in audits:
        for there in report.damaged:
            if (there.path, there.what) == (finding.path, finding.what):
                return there.where if there.where == "cache rebuild" else step or there.where
    return finding.where


# ---- DeepSpeed -----------------------------------------------------------------------------------------


def start_deepspeed() -> None:
    """Make a process group of one over gloo, without a port; keep DeepSpeed from compiling anything."""
    import deepspeed

    # A helper for several processes on one CPU, which the first process group would compile for a minute.
    compatible = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(compatible, dict):
        compatible["deepspeed_shm_comm"] = False
    # Nothing is computed in it here; older releases refuse a config for a GPU because of it.
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if not accelerator.is_fp16_supported():
        accelerator.is_fp16_supported = lambda: True
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def preload() -> str:
    """Import DeepSpeed before the forks, with all that each would spend most of its time on; its version."""
    import deepspeed

    # DeepSpeed's check of an optimizer imports Muon, and that the compiler.
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    return str(deepspeed.__version__)


def runnable(asked: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Check a DeepSpeed config with DeepSpeed, and keep of it what decides over position tables.

    Raises:
        ConfigError: the installed DeepSpeed refuses it.
    """
    whole = _without_auto(asked)
    for name in ("bf16", "fp16"):
        if isinstance(asked.get(name), dict) and asked[name].get("enabled") == "auto":
            whole[name] = {**whole.get(name, {}), "enabled": DTYPES[name] == dtype}
    _check(whole)
    kept = {name: whole[name] for name in ("bf16", "bfloat16", "fp16") if name in whole}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage_of(whole), **_SMALL},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **{name: {"enabled": bool(section.get("enabled", False))} for name, section in kept.items()},
    }


# The buckets of a real config are larger than a small model by orders of magnitude.
_SMALL = {
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), 100_000),
    "sub_group_size": 1_000_000,
    "stage3_param_persistence_threshold": 0,
}


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """Leave out what HF Trainer fills in."""
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in section.items()
        if value != "auto"
    }


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _check(config: dict[str, Any]) -> None:
    import deepspeed

    reader = getattr(deepspeed, "DeepSpeedConfig", None)
    if reader is None:
        raise IncompatibleVersionError(
            f"deepspeed {deepspeed.__version__} has no DeepSpeedConfig to read a config with; "
            "expected one of 0.14 to 0.19"
        )
    checked = {name: copy.deepcopy(value) for name, value in config.items() if name not in _BATCH}
    try:
        with contextlib.redirect_stdout(None):
            reader({**checked, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # pydantic, assertions, ValueError, KeyError: all are about the values
        said = " ".join(str(error).split())
        raise ConfigError(
            f"deepspeed {deepspeed.__version__} refuses this DeepSpeed config: {said}"
        ) from error
