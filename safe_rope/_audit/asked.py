"""What asking the forward of a module tells of its arithmetic: phases and counts in low precision."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from safe_rope._audit import computed, counted
from safe_rope._audit.report import Finding, Severity
from safe_rope._base import bytecode
from safe_rope._recognition.ask import UnansweredError
from safe_rope._recognition.reference import stock_class
from safe_rope._recognition.tables import own_tensors

if TYPE_CHECKING:
    from safe_rope._audit.module import ModuleAuditor


def told_by_forward(auditor: ModuleAuditor) -> list[Finding] | None:
    """Return what the forward tells in each dtype: damaged where it is so in all, unknown where in some.

    An empty list where it tells nothing bad, and None where there is nothing to ask.
    """
    results = [
        _computed_low(auditor, dtype) or _counted_low(auditor, dtype) for dtype in auditor.dtypes[::-1]
    ]
    damaged = [one for one in results if one and any(found.severity == "damaged" for found in one)]
    if damaged and len(damaged) < len(results):
        said = "in one of the dtypes of the parameters around it"
        return [replace(one, severity="unknown", source=f"{one.source} {said}") for one in damaged[0]]
    told = [one for one in results if one is not None]
    return max(damaged or told, key=len) if told else None


def _computed_low(auditor: ModuleAuditor, model_dtype: torch.dtype) -> list[Finding] | None:
    module = auditor.module
    dtype = None if auditor.result.protected else computed.dtype_of(module, model_dtype)
    if dtype is None or not computed.may_be_asked(module):
        return None
    try:
        error, certain = computed.error_of(module, dtype)
    except UnansweredError as problem:
        if not _may_compute(module) or any(True for _ in own_tensors(module)):
            return None
        said = f"what it computes is not measured: {problem}"
        return [auditor.finding("forward", "unknown", said, dtype=dtype)]
    if not error:
        return None if error is None else []
    said = "its forward computes positions in low precision"
    said = said if certain else f"{said}, by weights that are trained"
    severity: Severity = "damaged" if certain else "unknown"
    return [auditor.finding("forward", severity, said, "forward", dtype, cos_error=error)]


def _may_compute(module: nn.Module) -> bool:
    """Whether a forward that nobody could ask takes sines of what it counts in the dtype of the model."""
    stock: Any = stock_class(module)
    makes = bytecode.facts(stock).turns_counts and not bytecode.conduct(stock).widens
    # Beside weights much else has the dtype of something.
    is_alone = next(module.parameters(), None) is None
    return makes and (is_alone or bytecode.counts_as_given(stock, ("arange", "linspace")))


def _counted_low(auditor: ModuleAuditor, model_dtype: torch.dtype) -> list[Finding] | None:
    module = auditor.module
    stock: Any = stock_class(module)
    dtype = computed.dtype_of(module, model_dtype)
    if dtype is None or not counted.may_be_asked(module):
        return None
    try:
        error, certain = counted.error_of(module, dtype)
    except UnansweredError as problem:
        has_weights = next(module.parameters(), None) is not None
        if not (has_weights and bytecode.counts_as_given(stock)):
            return None
        said = f"what it counts is not measured: {problem}"
        return [auditor.finding("forward", "unknown", said, dtype=dtype)]
    if error == 0:
        return None
    said = "its forward counts positions in a dtype that rounds them"
    severity: Severity = "damaged" if certain else "unknown"
    return [auditor.finding("forward", severity, said, "forward", dtype, cos_error=error)]
