"""From what a trace saw to a verdict for each parameter, in words."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch

from safe_rope.autocast._flow import Flow, Uses
from safe_rope.autocast._parameters import Shared, full_numel, full_shape
from safe_rope.autocast.safety import ParameterSafety, SafetyReport

_EXPERTS = re.compile(r"expert|grouped_mm|moe", re.IGNORECASE)
_SHOWN = 2


def make_report(groups: list[Shared], flow: Flow, dtype: torch.dtype, notes: list[str]) -> SafetyReport:
    """Return the report on ``groups``, from their uses in ``flow``."""
    low = _short(dtype)
    by_name: dict[str, tuple[Shared, Any]] = {}
    experts: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        uses = flow.uses.get(group, Uses())
        safe, reason = _verdict(group, uses, dtype)
        read_by = uses.reads[0] if uses.reads and not safe else None
        for operator in uses.read_operators:
            if not safe and _runs_experts(group, operator):
                experts[operator] += group.names
        for name in group.names:
            others = tuple(other for other in group.names if other != name)
            text = f"{reason}; tied to {', '.join(others)}" if others else reason
            by_name[name] = (group, (safe, text, read_by, others))
    return SafetyReport(
        parameters=tuple(_entry(name, *by_name[name]) for name in _in_order(groups, by_name)),
        warnings=(*_about_experts(experts, low), *dict.fromkeys(notes)),
        dtype=low,
    )


def _in_order(groups: list[Shared], by_name: dict[str, Any]) -> list[str]:
    names = [name for group in groups for name in group.names]
    assert len(names) == len(by_name)
    return names


def _entry(
    name: str, group: Shared, verdict: tuple[bool, str, str | None, tuple[str, ...]]
) -> ParameterSafety:
    parameter = group.parameters[0]
    numel = full_numel(parameter)
    safe, reason, read_by, others = verdict
    return ParameterSafety(
        name, safe, reason, numel, numel * parameter.element_size(), read_by=read_by, tied_to=others
    )


def _verdict(group: Shared, uses: Uses, dtype: torch.dtype) -> tuple[bool, str]:
    own = group.parameters[0].dtype
    if own == dtype:
        return True, f"already {_short(own)}"
    if own != torch.float32:
        return False, f"{_short(own)}, which autocast does not cast to {_short(dtype)}"
    if not uses.any:
        return False, "unused in the traced step"
    if uses.reads:
        forward = [text for text in uses.reads if not text.endswith("in the backward")] or uses.reads
        more = f"; and {len(forward) - _SHOWN} more" if len(forward) > _SHOWN else ""
        return False, f"read in {_short(own)} by {'; '.join(forward[:_SHOWN])}{more}"
    return True, f"every use goes through a cast to {_short(dtype)}"


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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
