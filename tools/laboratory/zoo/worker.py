"""One architecture through every scenario, with and without the guard. Runs in a process of its own.

S1 direct zero.Init · S2 transformers' ZeRO-3 ``from_pretrained`` · S3 S2, then ``deepspeed.initialize`` ·
S4 ``from_pretrained`` in BF16, then ZeRO-2 initialize · S4a ``from_config`` in BF16 · S5 ``.to(bfloat16)``
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from laboratory.ranks import ds_config
from laboratory.zoo.run import compare
from laboratory.zoo.shrink import (
    build,
    buildable,
    config_classes,
    count_parameters,
    model_class,
    quick_weights,
)
from laboratory.zoo.tables import Table, damage, forward_tables, position_tables, stored

_LOADS = {
    "S1": "_zero_init",
    "S2": "_zero3_pretrained",
    "S4": "_from_pretrained",
    "S4a": "_from_config",
    "S5": "_plain",
}
_IMPORTED_LATER = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "deepspeed",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.original_muon",
    "transformers.modeling_utils",
    "transformers.core_model_loading",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.integrations.deepspeed",
    "safe_rope._protection",
)
Guard = Callable[[], AbstractContextManager[Any]]


def prepare() -> None:
    """What every architecture needs, done once in the parent: imports, and DeepSpeed's C++ helper."""
    for name in _IMPORTED_LATER:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    from deepspeed.ops import op_builder

    for name in ("UtilsBuilder", "ShareMemCommBuilder"):
        with contextlib.suppress(Exception):
            getattr(op_builder, name)().load()
    with contextlib.suppress(Exception):
        importlib.import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder().load()
    config_classes()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a child's collections then look at what the child has made


def survey(
    model_type: str,
    scenarios: tuple[str, ...],
    kinds: tuple[str, ...],
    largest: int,
    *,
    audits: bool = False,
    forwards: bool = True,
) -> dict[str, Any]:
    """Return the line of ``model_type``: what was built, and what each scenario damaged.

    Args:
        model_type: of the config class.
        scenarios: of `summary.TITLES`.
        kinds: ``"stock"``, ``"guard"`` or both.
        largest: parameters of a model that is still built.
        audits: ask `safe_rope.audit` for its verdict after each scenario.
        forwards: run the guarded model beside the stock one.

    """
    started = time.monotonic()
    row: dict[str, Any] = {"model_type": model_type}
    config_class = config_classes()[model_type]
    cls = model_class(config_class)
    if cls is None:
        return row | {"status": "unbuildable", "reason": "no model class belongs to this config"}
    row["class"] = cls.__name__
    with quick_weights():
        config, reason = buildable(config_class, cls, largest)
    if config is None:
        return row | {"status": "unbuildable", "reason": reason}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as quick:
        quick.enter_context(quick_weights())
        clean = build(cls, config)
        tables = position_tables(clean, build(cls, config, seed=1))
        checkpoint: Path | str = ""
        if tables or forward_tables(clean):
            checkpoint = _save(clean, Path(folder))
            with contextlib.suppress(Exception):  # what a config class makes of its own file
                read = config_class.from_pretrained(folder)
                if (count_parameters(lambda: build(cls, read)) or 0) <= largest:
                    clean = build(cls, read)
                    tables = position_tables(clean, build(cls, read, seed=1))
                    config = read
        tables.update(forward_tables(clean))
        row |= {"status": "built", "tables": len(tables), "names": sorted({_short(path) for path in tables})}
        if not tables and not audits:
            return row | {"scenarios": {}, "seconds": round(time.monotonic() - started, 2)}
        checkpoint = checkpoint if tables else "it holds no position tables"
        scenarios = scenarios if tables else ("S5",)
        del clean
        runner = _Runner(cls, config, checkpoint, tables, audits)
        row["scenarios"] = {name: {} for name in scenarios}
        for kind in kinds:
            for name in scenarios:
                row["scenarios"][name][kind] = runner.run(name, kind)
        row["protection"] = runner.protection
        quick.close()
        if "guard" in kinds and forwards and tables:
            row["run"] = compare(cls, config)
            row["rotation"] = row["run"].pop("rotation", None)
    return row | {"seconds": round(time.monotonic() - started, 2)}


def _short(path: str) -> str:
    return path.rpartition(".")[2]


def _save(model: Any, folder: Path) -> Path | str:
    try:
        model.save_pretrained(folder)
    except Exception:
        try:
            model.save_pretrained(folder, safe_serialization=False)
        except Exception as error:
            return f"cannot be saved: {type(error).__name__}: {error}"[:160]
    return folder


class _Runner:
    def __init__(
        self, cls: Any, config: Any, checkpoint: Path | str, tables: dict[str, Table], audits: bool
    ) -> None:
        self.cls = cls
        self.config = config
        self.checkpoint = checkpoint
        self.tables = tables
        self.audits = audits
        self.protection: dict[str, Any] = {}
        self._kept: Any = None

    def run(self, name: str, kind: str) -> dict[str, Any]:
        guard = _guard(kind)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if name == "S3":
                    model, self._kept = self._kept, None
                    if model is None:
                        return {"error": "not loaded in S2"}
                    model = _engine(model, 3)
                else:
                    self._kept = None
                    with guard() as session:
                        model = getattr(self, _LOADS[name])()
                    if name == "S2":
                        self._kept = model
                    if kind == "guard" and name == "S5":
                        self.protection = _protection(session)
                    if name == "S4":
                        model = _engine(model, 2)
                    elif name == "S5":
                        model = model.to(_device(), torch.bfloat16)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error!s}"[:300]}
        finally:
            _clean_up()
        audited = {"audit": _audited(model)} if self.audits else {}
        actual = stored(model)
        actual.update({path: table.values for path, table in forward_tables(model, every_form=True).items()})
        return {"damaged": damage(self.tables, actual)} | audited

    def _zero_init(self) -> Any:
        import deepspeed

        with deepspeed.zero.Init(config_dict_or_path=ds_config(3)):
            return build(self.cls, self.config)

    def _zero3_pretrained(self) -> Any:
        held = _transformers_deepspeed().HfDeepSpeedConfig(ds_config(3))
        model = self._from_pretrained()
        del held
        return model

    def _from_config(self) -> Any:
        config = copy.deepcopy(self.config)
        name = "dtype" if "dtype" in inspect.getsource(self.cls._from_config) else "torch_dtype"
        try:
            return self.cls._from_config(config, **{name: torch.bfloat16})
        except TypeError:
            return self.cls._from_config(config, torch_dtype=torch.bfloat16)

    def _plain(self) -> Any:
        return build(self.cls, self.config)

    def _from_pretrained(self) -> Any:
        if isinstance(self.checkpoint, str):
            raise OSError(self.checkpoint)
        config = copy.deepcopy(self.config)  # not of the file, which may describe a larger model
        return self.cls.from_pretrained(self.checkpoint, config=config, torch_dtype=torch.bfloat16)


def _engine(model: Any, stage: int) -> Any:
    import deepspeed

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage))[0].module


def _device() -> str:
    """Return where DeepSpeed runs."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def _guard(kind: str) -> Guard:
    if kind == "stock":
        return contextlib.nullcontext
    import safe_rope

    return safe_rope.guard


def _audited(model: Any) -> dict[str, Any]:
    """The verdict of the audit, and what it rests on."""
    import safe_rope

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = safe_rope.audit(model)
    verdict = "damaged" if report.damaged else "ok" if report.ok else "unknown"
    found = [f for f in report.findings if f.severity == verdict]
    return {"verdict": verdict, "why": [f"{f.path} {f.describe()}"[:200] for f in found[:3]]}


def _protection(session: Any) -> dict[str, Any]:
    levels: dict[str, list[str]] = {}
    for entry in session.report.protected:
        levels.setdefault(getattr(entry, "level", "full"), []).append(entry.path)
    return {
        **{level: len(paths) for level, paths in levels.items()},
        "unprotected": [str(entry) for entry in session.report.unprotected][:5],
    }


def _transformers_deepspeed() -> Any:
    # Any: what its annotations say differs between the versions that this must run with.
    return importlib.import_module("transformers.integrations.deepspeed")


def _clean_up() -> None:
    from deepspeed.runtime.zero import partition_parameters

    _transformers_deepspeed().unset_hf_deepspeed_config()
    if partition_parameters.zero_init_context:
        partition_parameters.shutdown_init_context()
        partition_parameters.zero_init_context = 0
    torch.set_default_dtype(torch.float32)
