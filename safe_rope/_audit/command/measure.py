"""Run one load path, stock or guarded, and audit the model after each of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from safe_rope._audit.command.dump import gather, save
from safe_rope._audit.command.job import Job
from safe_rope._audit.command.paths import Material, Step, implied, start_deepspeed
from safe_rope._audit.model import audit
from safe_rope._audit.wrappers import unwrapped
from safe_rope._protection import guard


def measure_path(job: Job, material: Material, index: int, kind: str, folder: Path) -> dict[str, Any]:
    """Return, as plain data, the audit after every step of the path, and what the guard did.

    To be called in a process of its own.
    """
    path = implied(material)[index]
    if material.deepspeed is not None:
        start_deepspeed()
    positions = job.measured(material.skeleton.announced)
    steps = []
    protection: dict[str, Any] | None = None
    model: nn.Module | None = None
    for step, loaded, report in _walk(path.steps(material), kind):
        model = unwrapped(loaded)[0]  # paths stay the same whatever the engine
        steps.append({"step": step, "audit": audit(model, positions).to_dict()})
        protection = report if report is not None else protection
    result: dict[str, Any] = {"path": path.name, "kind": kind, "steps": steps, "protection": protection}
    if job.dump and model is not None:
        result["file"] = f"tables-{index}-{kind}.safetensors"
        tables = gather(model, job.dumped(material.skeleton.announced))
        save(folder / result["file"], {f"{path.name} ({kind})": tables})
    return result


def _walk(steps: Iterator[Step], kind: str) -> Iterator[tuple[str, nn.Module, dict[str, Any] | None]]:
    """Yield each step, the model, and after loading, which the guard is open for, the guard's report."""
    session: Any = None
    with contextlib.ExitStack() as stack:
        if kind == "guarded":
            session = stack.enter_context(guard())
        first = next(steps)
    yield *first, None if session is None else session.report.to_dict()
    for step in steps:
        yield *step, None
