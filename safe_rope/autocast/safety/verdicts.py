"""From what a trace saw to a verdict for each parameter, in words."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import nn

from safe_rope.autocast.safety.flow import Flow, Uses
from safe_rope.autocast.safety.parameters import Shared, full_numel, full_shape
from safe_rope.autocast.safety.report import ParameterSafety, SafetyReport

_EXPERTS = re.compile(r"expert|grouped_mm|moe", re.IGNORECASE)
_SHOWN = 2


def make_report(
    model: nn.Module, groups: list[Shared], flow: Flow, dtype: torch.dtype, notes: list[str]
) -> SafetyReport:
    """Return the report on ``groups``, the parameters of ``model``, from their uses in ``flow``."""
    entries: dict[str, ParameterSafety] = {}
    experts: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        uses = flow.uses.get(group, Uses())
        safe, reason = _verdict(group, uses, dtype)
        for operator in () if safe else sorted(uses.read_operators):
            if _runs_experts(group, operator):
                experts[operator] += group.names
        read_by = uses.reads[0] if uses.reads and not safe else None
        entries |= {name: make_entry(name, group, safe, reason, read_by) for name in group.names}
    ordered = [entries[name] for name, _ in model.named_parameters(remove_duplicate=False)]
    warnings = (*_about_experts(experts, short(dtype)), *dict.fromkeys(notes))
    return SafetyReport(tuple(ordered), warnings, short(dtype))


def make_entry(
    name: str, group: Shared, safe: bool, reason: str, read_by: str | None = None
) -> ParameterSafety:
    """Return the entry of the parameter ``group`` under one of its names."""
    others = tuple(other for other in group.names if other != name)
    text = f"{reason}; tied to {', '.join(others)}" if others else reason
    numel = full_numel(group.parameters[0])
    size = numel * group.parameters[0].element_size()
    return ParameterSafety(name, safe, text, numel, size, read_by, others)


def _verdict(group: Shared, uses: Uses, dtype: torch.dtype) -> tuple[bool, str]:
    own = group.parameters[0].dtype
    if own == dtype:
        return True, f"already {short(own)}"
    if own != torch.float32:
        return False, f"{short(own)}, which autocast does not cast to {short(dtype)}"
    if not uses.any:
        return False, "unused in the traced step"
    if uses.reads:
        forward = [text for text in uses.reads if not text.endswith("in the backward")] or uses.reads
        more = f"; and {len(forward) - _SHOWN} more" if len(forward) > _SHOWN else ""
        return False, f"read in {short(own)} by {'; '.join(forward[:_SHOWN])}{more}"
    return True, f"every use goes through a cast to {short(dtype)}"


def _runs_experts(group: Shared, operator: str) -> bool:
    stacked = len(full_shape(group.parameters[0])) >= 3
    return stacked and any(_EXPERTS.search(text) for text in (operator, *group.names))


def _about_experts(experts: dict[str, list[str]], low: str) -> list[str]:
    return [
        f"{len(names)} expert parameter(s), such as {names[0]}, go through {operator}, which autocast does "
        f"not cast to {low}: these experts compute in float32; where the model offers it, choose another "
        'implementation (experts_implementation="eager" or "batched_mm" in transformers)'
        for operator, names in sorted(experts.items())
    ]


def short(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
