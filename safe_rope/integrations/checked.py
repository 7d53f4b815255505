"""What the callbacks have in common: they measure a model when training begins, and end the run or warn."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from typing import Any, Literal

from safe_rope._audit.model import AuditReport, audit
from safe_rope._base.text import counted
from safe_rope._protection.report import is_main_rank
from safe_rope.errors import ConfigError, PrecisionWarning

logger = logging.getLogger(__name__)


class Checked:
    """A callback's option, its report, and what it does with a model; mixed into a trainer's own class."""

    def __init__(self, action: Literal["raise", "warn"] = "raise") -> None:
        if action not in ("raise", "warn"):
            raise ConfigError(f'action must be "raise" or "warn", got {action!r}')
        self.action = action
        self.report: AuditReport | None = None

    def _measure(self, model: Any) -> dict[str, float]:
        """Audit ``model``; return what a trainer's log gets."""
        self.report = report = audit(model)
        verdicts = Counter(module.verdict for module in report.modules)
        found = {
            "max_phase_error_rad": report.max_phase_error_rad,
            "modules": len(report.modules),
            "protected": sum(module.protected for module in report.modules),
            "damaged": verdicts["damaged"],
            "unknown": verdicts["unknown"],
        }
        return {f"safe_rope/{name}": value for name, value in found.items()}

    def _judge(self) -> None:
        report = self.report
        assert report is not None
        if self.action == "raise":
            report.raise_if_damaged(unknown=True)
        elif not report.ok and is_main_rank():
            warnings.warn(str(report), PrecisionWarning, stacklevel=3)
        if report.ok and is_main_rank():
            number = counted(len(report.modules), "module")
            logger.info("%s with positions audited before training: none is damaged", number)
