"""One subject under one load path, with or without safe_rope: what is built, held, saved and answered.

Runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laboratory.libraries.judge import (
    Truth,
    distance,
    parameters,
    results_problem,
    short,
    table_problems,
    tensors_of,
    truth_of,
)
from laboratory.libraries.subject import Subject
from laboratory.ranks import ds_config
from laboratory.zoo.tables import stored

FP32, BF16 = torch.float32, torch.bfloat16
HOW = ("guard", "protect")
"""With the library: a guard around the building, or `protect` on what has come through the load path."""


class _Wrapped(nn.Module):
    """What DeepSpeed needs besides a module without weights: something to train."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.subject = subject
        self.head = nn.Linear(2, 2)


# ---- load paths ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _zero_init() -> Iterator[None]:
    import deepspeed

    config = ds_config(3)
    config["zero_optimization"]["memory_efficient_linear"] = False  # stays, and adds in another order
    with deepspeed.zero.Init(config_dict_or_path=config):
        yield


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(BF16)
    try:
        yield
    finally:
        torch.set_default_dtype(FP32)


def _cast(model: nn.Module, truth: Truth) -> nn.Module:
    return model.to(BF16)


def _back(model: nn.Module, truth: Truth) -> nn.Module:
    return model.half().float()


def _materialize(model: nn.Module, truth: Truth) -> nn.Module:
    torch.use_deterministic_algorithms(True)  # memory that nobody has filled is then NaN
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    model.load_state_dict(truth.saved)
    return model


def _engine(model: nn.Module, truth: Truth) -> nn.Module:
    import deepspeed

    wrapped = _Wrapped(model)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    engine = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=ds_config(2))[0]
    inner: nn.Module = engine.module.subject
    return inner


def _nothing(model: nn.Module, truth: Truth) -> nn.Module:
    return model


Around = Callable[[], contextlib.AbstractContextManager[Any]]
PATHS: dict[str, tuple[Around, Callable[[nn.Module, Truth], nn.Module], torch.dtype]] = {
    "plain FP32": (contextlib.nullcontext, _nothing, FP32),
    "zero.Init": (_zero_init, _nothing, BF16),
    ".to(bf16)": (contextlib.nullcontext, _cast, BF16),
    "default dtype": (_default_dtype, _nothing, BF16),
    "half and back": (contextlib.nullcontext, _back, FP32),
    "meta": (lambda: torch.device("meta"), _materialize, FP32),
    "ZeRO-2": (contextlib.nullcontext, _engine, BF16),
}
"""What is around the building, what comes after it, and the dtype of the model's activations then."""
DISTRIBUTED = ("zero.Init", "ZeRO-2")


# ---- one cell ------------------------------------------------------------------------------------------


def find_truth(subject: Subject, file: Path) -> dict[str, Any]:
    """Build the subject with plain torch and write what it is to ``file``; say how large it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, again = _build(subject, 0), _build(subject, 1)
        counts = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
        }
        truth = truth_of(model, again)
        truth.results = _run(subject, model, FP32)
    torch.save(truth, file)
    return counts | {"tables": sorted(truth.tables), "results": len(truth.results)}


def measure(subject: Subject, path: str, how: str | None, file: Path, tables: str) -> dict[str, Any]:
    """Return what the subject is after the load path.

    Args:
        subject: what is built.
        path: of `PATHS`.
        how: of `HOW`; None without the library.
        file: what `find_truth` has written.
        tables: the option of ``guard`` and ``protect``.

    """
    truth: Truth = torch.load(file, weights_only=False)
    slack = subject.positions * 2.0**-23 if tables == "exact" and how else 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, report = _load(subject, path, how, truth, tables)
        except Exception as error:
            return {"build": _line(error)}
        lowest = torch.float16 if path == "half and back" else None
        tables_off = table_problems(truth.tables, model, slack, lowest)
        found: dict[str, Any] = {"tables": tables_off, "saved": _saved(model)}
        found["true"] = {
            "gives": [short(result.dtype) for result in truth.results],
            "saves": {key: short(value.dtype) for key, value in truth.saved.items()},
        }
        found["native"] = _native(subject, model, truth, PATHS[path][2], slack)
        reports = [report]
        if subject.whole or "error" in found["native"] or found["native"]["problem"]:
            found["plain"], again = _plain(subject, path, how, truth, tables, slack)
            reports.append(again)
        found["named"] = [*_warned(caught), *(line for report in reports for line in _named(report))][:4]
    return found


def _load(subject: Subject, path: str, how: str | None, truth: Truth, tables: str) -> tuple[nn.Module, Any]:
    around, after, _ = PATHS[path]
    report = None
    with _guard(how, tables) as session, around():
        model = _build(subject, 0)
    model = after(model, truth)
    if how == "guard":
        report = session
    elif how == "protect":
        import safe_rope

        options: dict[str, Any] = (
            {"tables": tables} if "tables" in inspect.signature(safe_rope.protect).parameters else {}
        )
        report = safe_rope.protect(model, **options)
    return model, report


def _guard(how: str | None, tables: str) -> contextlib.AbstractContextManager[Any]:
    if how != "guard":
        return contextlib.nullcontext()
    import safe_rope

    return safe_rope.guard(tables=tables)  # type: ignore[arg-type]


def _build(subject: Subject, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = subject.build()
    return model.eval()


def _saved(model: nn.Module) -> dict[str, str]:
    """What a file of the model would hold: the dtype of each entry."""
    try:
        state = model.state_dict()
    except Exception as error:  # of partitioned weights, which some classes take apart
        return {"state_dict": _line(error)}
    return {key: short(value.dtype) for key, value in state.items() if isinstance(value, torch.Tensor)}


def _native(
    subject: Subject, model: nn.Module, truth: Truth, dtype: torch.dtype, slack: float
) -> dict[str, Any]:
    """Run the model as it was loaded, on the true weights rounded to the dtypes that it has."""
    try:
        _fill(model, truth, None)
        results = _run(subject, model, dtype)
    except Exception as error:
        return {"error": _line(error)}
    return {
        "dtypes": [short(result.dtype) for result in results],
        "problem": results_problem(truth.results, results, slack),
        "distance": distance(truth.results, results),
    }


def _plain(
    subject: Subject, path: str, how: str | None, truth: Truth, tables: str, slack: float
) -> tuple[dict[str, Any], Any]:
    """Run the loaded model in FP32 on the true weights: what is off then is its positions."""
    report = None
    try:
        model, report = _load(subject, path, how, truth, tables)
        _fill(model, truth, FP32)
        model.float()
        results = _run(subject, model, FP32)
    except Exception as error:
        return {"error": _line(error)}, report
    return {"problem": results_problem(truth.results, results, slack)}, report


def _fill(model: nn.Module, truth: Truth, dtype: torch.dtype | None) -> None:
    """Put the true weights, and whatever else is no position table, into the model.

    Args:
        model: whose weights may be partitioned, rounded or not filled.
        truth: its weights, by path.
        dtype: that they get; None for the dtype of each.

    """
    new: dict[int, nn.Parameter] = {}
    for path, module, name, parameter in list(parameters(model)):
        if id(parameter) not in new:
            value = truth.rest[path].to(dtype or parameter.dtype)
            new[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module._parameters[name] = new[id(parameter)]
    held = stored(model)
    with torch.no_grad():
        for path, value in truth.rest.items():
            owner, _, name = path.rpartition(".")
            buffers = model.get_submodule(owner)._buffers if path in held else {}
            if name in buffers and held[path].shape == value.shape:
                buffers[name] = value.to(dtype or held[path].dtype)


def _run(subject: Subject, model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [result.clone() for result in tensors_of(subject.ask(model, lambda value: value.to(dtype)))]


# ---- what the library says -----------------------------------------------------------------------------


def _warned(caught: list[warnings.WarningMessage]) -> list[str]:
    from safe_rope.errors import PrecisionWarning

    return [str(one.message)[:200] for one in caught if issubclass(one.category, PrecisionWarning)]


def _named(source: Any) -> list[str]:
    """Whatever a report names besides what it protects: a list of its own, or an entry with a reason."""
    report = getattr(source, "report", source)
    if not hasattr(report, "to_dict"):
        return []
    lines = []
    for name, entries in report.to_dict().items():
        if isinstance(entries, list):
            for entry in entries:
                if name != "protected" or (isinstance(entry, dict) and entry.get("reason")):
                    lines.append(str(entry)[:200])
    return lines


def _line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:220]}{where}"
