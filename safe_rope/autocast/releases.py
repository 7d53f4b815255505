"""What is known to be wrong with torch_autocast in which DeepSpeed releases: data, found by measuring.

Every entry was measured on two ranks against DDP with torch.autocast; ``docs/autocast.md`` has the numbers.
A fault that safe_rope corrects is not listed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

FIRST_RELEASE = "0.17.2"
"""The first DeepSpeed that has the section ``torch_autocast``."""

NEWEST_TESTED = "0.19.8"


@dataclass(frozen=True)
class Fault:
    """One thing that some releases do wrong.

    ``stages`` are the ZeRO stages concerned; with ``accumulation`` it happens only where
    gradient_accumulation_steps is above 1, with ``overlap`` only where overlap_comm is on or
    contiguous_gradients off. ``first`` and ``last`` are the releases between which it happens.
    """

    first: str
    last: str
    stages: frozenset[int]
    what: str
    remedy: str
    accumulation: bool = False
    overlap: bool = False


FAULTS = (
    Fault(
        first="0.17.2",
        last="0.17.5",
        stages=frozenset({1, 2}),
        what="multiplies every gradient by 65536, a loss scale that is never removed",
        remedy="use DeepSpeed 0.17.6 or newer, or zero_optimization.stage 3",
    ),
    Fault(
        first="0.17.6",
        last="0.18.2",
        stages=frozenset({2}),
        accumulation=True,
        what="lets each micro-batch's gradient overwrite the last one's",
        remedy="use DeepSpeed 0.19.3 or newer, gradient_accumulation_steps 1, or zero_optimization.stage 3",
    ),
    Fault(
        first="0.17.6",
        last="0.18.2",
        stages=frozenset({1}),
        accumulation=True,
        overlap=True,
        what="gets gradients wrong by up to their own size",
        remedy="set overlap_comm to false and contiguous_gradients to true, or use DeepSpeed 0.19.3 or newer",
    ),
    Fault(
        first="0.18.3",
        last="0.18.3",
        stages=frozenset({0, 1, 2}),
        accumulation=True,
        what="divides by the accumulation steps twice (ZeRO 0), or keeps the last micro-batch only",
        remedy="use DeepSpeed 0.19.3 or newer, gradient_accumulation_steps 1, or zero_optimization.stage 3",
    ),
    Fault(
        first="0.18.9",
        last="0.18.9",
        stages=frozenset({1, 2}),
        what="fails in the all-gather after the step",
        remedy="use DeepSpeed 0.19.3 or newer, or zero_optimization.stage 3",
    ),
)


def faults(release: str, stage: int, accumulation_steps: int, overlap: bool = False) -> list[Fault]:
    """Return every known fault of ``release`` with these settings."""
    return [
        fault
        for fault in FAULTS
        if Version(fault.first).release <= Version(release).release <= Version(fault.last).release
        and stage in fault.stages
        and (accumulation_steps > 1 or not fault.accumulation)
        and (overlap or not fault.overlap)
    ]
