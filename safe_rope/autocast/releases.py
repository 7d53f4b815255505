"""What is known to be wrong with torch_autocast in which DeepSpeed releases: data, found by measuring.

Every entry was measured on two ranks against DDP with torch.autocast; ``docs/autocast.md`` has the numbers.
A fault that safe_rope corrects is not listed here.
"""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import Version

FIRST_RELEASE = "0.17.6"
"""The first DeepSpeed whose section ``torch_autocast`` trains: before, gradients come out far too large."""

NEWEST_TESTED = "0.19.8"


class Fault(NamedTuple):
    """One thing that the releases from ``first`` to ``last`` do wrong at some ZeRO ``stages``.

    With ``accumulation`` it happens only where gradient_accumulation_steps is above 1, with ``overlap`` only
    where overlap_comm is on or contiguous_gradients off.
    """

    first: str
    last: str
    stages: tuple[int, ...]
    what: str
    remedy: str
    accumulation: bool = False
    overlap: bool = False


_NEWER = "use DeepSpeed 0.19.3 or newer"
_NO_STEPS = f"{_NEWER}, gradient_accumulation_steps 1, or zero_optimization.stage 3"
_OVERWRITTEN = "lets each micro-batch's gradient overwrite the last one's"
_WRONG = "gets gradients wrong by up to their own size"
_PLAIN = f"set overlap_comm to false and contiguous_gradients to true, or {_NEWER}"
_TWICE = "divides by the accumulation steps twice (ZeRO 0), or keeps the last micro-batch only"

FAULTS = (
    Fault("0.17.6", "0.18.2", (2,), _OVERWRITTEN, _NO_STEPS, accumulation=True),
    Fault("0.17.6", "0.18.2", (1,), _WRONG, _PLAIN, accumulation=True, overlap=True),
    Fault("0.18.3", "0.18.3", (0, 1, 2), _TWICE, _NO_STEPS, accumulation=True),
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
