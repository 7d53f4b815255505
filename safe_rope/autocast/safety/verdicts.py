"""From what a trace saw to a verdict for each parameter, in words."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from safe_rope._base.dtypes import dtype_name
from safe_rope._base.text import counted
from safe_rope.autocast.safety.flow import Flow, Uses
from safe_rope.autocast.safety.parameters import Shared, full_shape
from safe_rope.autocast.safety.report import ParameterSafety, SafetyReport

_EXPERTS = re.compile(r"expert|grouped_mm|moe", re.IGNORECASE)
_SHOWN = 2


def report_on_flow(model: nn.Module, groups: list[Shared], flow: Flow, notes: list[str]) -> SafetyReport:
    """Return the report on ``groups``, the parameters of ``model``, from their uses in ``flow``."""
    dtype = flow.low
    experts: dict[str, list[str]] = defaultdict(list)

    def verdict(group: Shared) -> tuple[bool, str, str | None]:
        uses = flow.uses.get(group, Uses())
        safe, reason = by_dtype(group, dtype) or _by_uses(uses, dtype)
        stacked = len(full_shape(group.parameters[0])) >= 3
        for operator in sorted(uses.read_operators) if stacked and not safe else ():
            if any(_EXPERTS.search(text) for text in (operator, *group.names)):
                experts[operator] += group.names
        return safe, reason, None if safe else next(iter(uses.reads), None)

    entries = make_entries(model, groups, verdict)
    warnings = (*_about_experts(experts, dtype_name(dtype)), *dict.fromkeys(notes))
    return SafetyReport(entries, warnings, dtype_name(dtype))


def make_entries(
    model: nn.Module, groups: list[Shared], verdict: Callable[[Shared], tuple[bool, str, str | None]]
) -> tuple[ParameterSafety, ...]:
    """Return the entries of all names in the model's order; ``verdict`` gives `safe`, `reason`, `read_by`."""
    entries = {}
    for group in groups:
        safe, reason, read_by = verdict(group)
        numel = math.prod(full_shape(group.parameters[0]))
        size = numel * group.parameters[0].element_size()
        for name in group.names:
            others = tuple(other for other in group.names if other != name)
            text = f"{reason}; tied to {', '.join(others)}" if others else reason
            entries[name] = ParameterSafety(name, safe, text, numel, size, read_by, others)
    return tuple(entries[name] for name, _ in model.named_parameters(remove_duplicate=False))


def by_dtype(group: Shared, dtype: torch.dtype) -> tuple[bool, str] | None:
    """Return the verdict on a parameter that is not FP32, and its reason; None for one that is."""
    own = group.parameters[0].dtype
    if own == dtype:
        return True, f"already {dtype_name(own)}"
    if own != torch.float32:
        return False, f"{dtype_name(own)}, which autocast does not cast to {dtype_name(dtype)}"
    return None


def _by_uses(uses: Uses, dtype: torch.dtype) -> tuple[bool, str]:
    if not uses.any:
        return False, "unused in the traced step"
    if uses.reads:
        forward = [text for text in uses.reads if not text.endswith("in the backward")] or uses.reads
        more = f"; and {len(forward) - _SHOWN} more" if len(forward) > _SHOWN else ""
        return False, f"read in float32 by {'; '.join(forward[:_SHOWN])}{more}"
    return True, f"every use goes through a cast to {dtype_name(dtype)}"


def _about_experts(experts: dict[str, list[str]], low: str) -> list[str]:
    return [
        f"{operator} computes with {counted(len(names), 'expert parameter')}, such as {names[0]}; autocast "
        f"does not cast it to {low}: these experts compute in float32; if the model offers it, choose "
        'another implementation (experts_implementation="eager" or "batched_mm" in transformers)'
        for operator, names in sorted(experts.items())
    ]
