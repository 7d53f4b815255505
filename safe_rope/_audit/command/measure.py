"""Run one load path, stock or guarded, and audit the model after each of its steps."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path

from safe_rope._audit.command.dump import save
from safe_rope._audit.command.job import Job
from safe_rope._audit.command.paths import Material, implied, start_deepspeed
from safe_rope._audit.model import audit
from safe_rope._audit.report import AuditReport, Finding, Where
from safe_rope._audit.wrappers import unwrapped
from safe_rope._protection import guard


def measure_path(job: Job, material: Material, path: str, kind: str, dump: Path | None) -> AuditReport:
    """Return the audit after the last step of the path; findings say which step did it.

    To be called in a separate process. The model's tables are written to ``dump``.
    """
    if material.deepspeed is not None:
        start_deepspeed()
    announced = material.skeleton.announced
    steps = implied(material)[path](material)
    with guard() if kind == "guarded" else contextlib.nullcontext():
        first = next(steps)
    audits: list[tuple[Where | None, AuditReport]] = []
    for step, loaded in itertools.chain([first], steps):
        model = unwrapped(loaded)[0]  # paths stay the same whatever the engine
        audits.append((step, audit(model, job.measured(announced))))
    if dump is not None:
        save(dump, {f"{path} ({kind})": audit(model, job.dumped(announced)).tables}, job.name)
    report = audits[-1][1]
    report.tables = {}  # it is sent to another process
    report.findings = [
        replace(f, where=_origin(f, audits)) if f.severity == "damaged" else f for f in report.findings
    ]
    return report


def _origin(finding: Finding, audits: list[tuple[Where | None, AuditReport]]) -> Where | None:
    """The step after which the damage is there; where that one only loads, what the damage itself tells."""
    for step, report in audits:
        for there in report.damaged:
            if (there.path, there.what) == (finding.path, finding.what):
                return there.where if there.where == "cache rebuild" else step or there.where
    return finding.where
