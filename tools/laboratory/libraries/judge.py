"""Truth, and how far from it a load path leaves a subject: tables, results, and the kind of each cell.

Truth is the same class built by plain torch in FP32. A result is right where it is one rounding of its own
dtype from that; a table likewise.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from laboratory.zoo.tables import comparable, is_computed, stored

RIGHT = "right"
REPAIRED = "repaired"
ONLY_WITH = "runs only with the guard"
NAMED = "named"
SILENT = "silently wrong"
HARMED = "right without, wrong with"
BROKEN = "fails only with the guard"
DTYPES = "other dtypes out"
BOTH_FAIL = "both fail"
KINDS = (RIGHT, REPAIRED, ONLY_WITH, NAMED, SILENT, HARMED, BROKEN, DTYPES, BOTH_FAIL)
FAILING = (SILENT, HARMED, BROKEN, DTYPES)

AS_STOCK = 2.0**-5
"""How far a module that computes in BF16 on right tables may be from FP32, relative to its largest result."""
NO_WORSE = 4.0
"""A whole model's result in BF16 may be this many times as far from FP32 as it is without the guard."""

_NO_POSITIONS = re.compile(
    r"running_(mean|var)$|num_batches_tracked$|(^|_)(mean|std)$|mask$|betas$|alphas|sigmas$|quantil|codebook|"
    r"kernel$|expert_bias"
)

State = dict[str, torch.Tensor]
Measured = Mapping[str, Any]


@dataclasses.dataclass
class Truth:
    """What a subject is in plain FP32.

    Args:
        tables: position tables, by path.
        rest: every other tensor that it stores, parameters among them, by path.
        saved: its ``state_dict``.
        results: what it answers.

    """

    tables: State
    rest: State
    saved: State
    results: list[torch.Tensor]


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter with its path, its owner and its name there; a shared one once for each place."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}", module, name, parameter


def truth_of(model: nn.Module, again: nn.Module) -> Truth:
    """Return what ``model`` is, but for its results; ``again`` is the same with other random numbers.

    Weights are such as BF16 can hold: what rounding them does is not asked.
    """
    first, second = stored(model), stored(again)
    frozen = {path: value for path, _, _, value in parameters(model) if not value.requires_grad}
    other = {path: value for path, _, _, value in parameters(again)}
    tables = {path: value for path, value in first.items() if _is_table(path, value, second.get(path))}
    tables |= {path: value for path, value in frozen.items() if _is_table(path, value, other.get(path))}
    rest = {path: value for path, value in first.items() if path not in tables}
    rest |= {path: value for path, _, _, value in parameters(model)}
    with torch.no_grad():
        for path, value in rest.items():
            if path not in tables and value.is_floating_point() and not value.is_meta:
                value.copy_(value.to(torch.bfloat16))
    saved = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return Truth(_copied(tables), _copied(rest), _copied(saved), [])


def _is_table(path: str, values: torch.Tensor, again: torch.Tensor | None) -> bool:
    if _NO_POSITIONS.search(path.rpartition(".")[2]) or values.is_meta or values.numel() < 2:
        return False
    if not (values.is_floating_point() or values.is_complex()):
        return False
    return is_computed(values, again)


def _copied(state: State) -> State:
    return {path: value.detach().clone() for path, value in state.items()}


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Every floating or complex tensor of a result, in order; complex ones as pairs of real numbers."""
    return [
        torch.view_as_real(value) if value.is_complex() else value
        for value in _flatten(result)
        if value.is_floating_point() or value.is_complex()
    ]


def _flatten(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result.detach()
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _flatten(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from _flatten(value)
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field in dataclasses.fields(result):
            yield from _flatten(getattr(result, field.name))


def table_problems(
    truth: State, model: nn.Module, slack: float, lowest: torch.dtype | None = None
) -> dict[str, str]:
    """Every position table of ``truth`` that ``model`` does not hold rightly, and what is wrong with it.

    Args:
        truth: the tables, by path.
        model: that should hold them.
        slack: relative error that is allowed besides a rounding.
        lowest: a dtype that the model has been in; a table that is a parameter may be rounded to it.

    """
    actual = {path: _whole(value) for path, _, _, value in parameters(model) if path in truth}
    actual = {path: value.to(lowest or value.dtype) for path, value in actual.items()}
    actual |= stored(model)
    problems = {}
    for path, expected in truth.items():
        values = actual.get(path)
        problem = "missing" if values is None else _table_problem(expected, values, slack)
        if problem:
            problems[path] = problem
    return problems


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _table_problem(expected: torch.Tensor, values: torch.Tensor, slack: float) -> str | None:
    values, problem = comparable(expected, values)
    if problem:
        return problem
    if expected.is_complex() != values.is_complex():
        return f"{short(values.dtype)}, expected {short(expected.dtype)}"
    if expected.is_complex():
        expected, values = torch.view_as_real(expected), torch.view_as_real(values)
    distance = roundings(expected, values.detach(), slack)
    worst = float((values.double() - expected.double()).abs().nan_to_num(nan=math.inf).max())
    return None if distance <= 0 else f"off by {worst:.2g} ({short(values.dtype)})"


def roundings(truth: torch.Tensor, actual: torch.Tensor, slack: float) -> float:
    """By how much the worst element exceeds one rounding of its dtype and ``slack``; at most 0 if none does.

    In FP32 and above nothing is to be rounded, and without slack every bit must agree.
    """
    expected, found = truth.double(), actual.double()
    same = (expected == found) | (expected.isnan() & found.isnan())
    error = (found - expected).abs()
    mantissa = expected.frexp()[1].double()
    unit = 2.0 ** (mantissa - 1) * torch.finfo(actual.dtype).eps
    least = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    unit = torch.where(expected == 0, 0.0, unit).clamp(min=least)
    low = torch.finfo(actual.dtype).bits < 32
    allowed = unit * (0.5 if low else 0.0) * (1 + 2.0**-20) + slack * expected.abs().clamp(min=1.0)
    excess = torch.where(same, torch.full_like(error, -1.0), (error - allowed).nan_to_num(nan=math.inf))
    return float(excess.max()) if excess.numel() else 0.0


def results_problem(truth: list[torch.Tensor], actual: list[torch.Tensor], slack: float) -> str | None:
    """Say what is more than one rounding from ``truth``, or return None."""
    if len(truth) != len(actual):
        return f"{len(actual)} results, expected {len(truth)}"
    for index, (expected, found) in enumerate(zip(truth, actual, strict=True)):
        if found.is_meta:
            return f"result {index} on meta"
        if expected.shape != found.shape:
            return f"result {index}: shape {list(found.shape)}, expected {list(expected.shape)}"
        if roundings(expected, found, slack) > 0:
            worst = float((found.double() - expected.double()).abs().nan_to_num(nan=math.inf).max())
            return f"result {index} off by {worst:.2g} ({short(found.dtype)})"
    return None


def distance(truth: list[torch.Tensor], actual: list[torch.Tensor]) -> float:
    """How far results are from ``truth``, relative to the largest of each; inf where none can be told."""
    worst = 0.0
    if len(truth) != len(actual):
        return math.inf
    for expected, found in zip(truth, actual, strict=True):
        if found.is_meta or expected.shape != found.shape:
            return math.inf
        if not expected.numel():
            continue
        error = (found.double() - expected.double()).abs().nan_to_num(nan=math.inf)
        error = torch.where(expected.isnan() & found.isnan() | (expected == found), 0.0, error)
        worst = max(worst, float(error.max()) / max(float(expected.double().abs().nan_to_num().max()), 1e-6))
    return worst


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


# ---- the kind of a cell --------------------------------------------------------------------------------


def kind_of(stock: Measured, mine: Measured, whole: bool) -> tuple[str, str]:
    """Return the kind of a cell and, in a line, why.

    Args:
        stock: what was measured under the load path without the library.
        mine: the same with it.
        whole: the subject is a whole model.

    """
    if "build" in mine:
        return (BOTH_FAIL if "build" in stock else BROKEN), mine["build"]
    if "build" not in stock:
        for run in ("native", "plain"):
            if "error" in mine.get(run, {}) and "error" not in stock.get(run, {"error": ""}):
                return BROKEN, mine[run]["error"]
        if "error" in mine.get("native", {}) and "error" in mine.get("plain", {"error": ""}):
            return BOTH_FAIL, mine["native"]["error"]
    wrong = problem(mine, whole) or _worse(stock, mine)
    if wrong is None:
        other = _other_dtypes(stock, mine)
        if "build" in stock or ("error" in stock["native"] and "error" not in mine["native"]):
            return ONLY_WITH, stock.get("build") or stock["native"]["error"]
        if other:
            return DTYPES, other
        damage = problem(stock, whole)
        return (REPAIRED, damage) if damage else (RIGHT, "")
    if "build" not in stock and problem(stock, whole) is None:
        return HARMED, wrong
    return (NAMED if mine["named"] else SILENT), wrong


def problem(measured: Measured, whole: bool) -> str | None:
    """Say what is wrong with what was measured, or return None."""
    if "build" in measured:
        return str(measured["build"])
    for path, text in measured["tables"].items():
        return f"{path} {text}"
    native, plain = measured["native"], measured.get("plain")
    if "error" not in native and native["problem"] is None and plain is None:
        return None
    if plain is None:
        return str(native.get("error") or native["problem"])
    if "error" in plain:
        return f"in FP32: {plain['error']}"
    if plain["problem"]:
        return f"in FP32: {plain['problem']}"
    if "error" in native or whole or native["distance"] <= AS_STOCK:
        return None
    return str(native["problem"])


def _worse(stock: Measured, mine: Measured) -> str | None:
    """A result in BF16 that is much farther off than stock's, though every table is right."""
    theirs, own = stock.get("native", {}), mine["native"]
    if "distance" not in theirs or "distance" not in own or own["problem"] is None:
        return None
    if own["distance"] <= max(NO_WORSE * theirs["distance"], AS_STOCK):
        return None
    return f"as loaded off by {own['distance']:.2g} of the largest, with stock {theirs['distance']:.2g}"


def _other_dtypes(stock: Measured, mine: Measured) -> str | None:
    """Say which result or which entry of a saved file has not the dtype that it has without the library."""
    if "build" in stock:
        return None
    sides = {
        "gives": (stock["native"].get("dtypes"), mine["native"].get("dtypes")),
        "saves": (stock["saved"], mine["saved"]),
    }
    for name, (theirs, own) in sides.items():
        if theirs is None or own is None or theirs == own:
            continue
        true = mine.get("true", {}).get(name)
        if isinstance(own, dict):
            key = min(key for key in {*own, *theirs} if own.get(key) != theirs.get(key))
            true = [f"{key} {(true or {}).get(key)}"]
            own, theirs = [f"{key} {own.get(key)}"], [str(theirs.get(key))]
        as_plain = " as in plain FP32" if own == true else ""
        return f"{name} {', '.join(own)}{as_plain}, without the guard {', '.join(theirs)}"
    return None
