"""What the callbacks have in common: they measure a model when training begins, and end the run or warn."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from typing import Any, Literal

from safe_rope._audit.model import audit
from safe_rope._audit.report import AuditReport
from safe_rope._base.text import counted
from safe_rope._protection.report import is_main_rank
from safe_rope.errors import ConfigError, DamagedTablesError, PrecisionWarning

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

    def _judge_other(self, name: str, other: AuditReport) -> None:
        """Judge a model that is trained against, or rewards: ``name`` says what holds it."""
        if self.action == "raise":
            try:
                other.raise_if_damaged()
            except DamagedTablesError as error:
                raise DamagedTablesError(f"the trainer's {name}: {error}") from None
        if not is_main_rank():
            return
        if not other.ok:
            warnings.warn(f"the trainer's {name}: {other}", PrecisionWarning, stacklevel=3)
            return
        assert self.report is not None
        ours = {module.module_class: module.protected for module in self.report.modules}
        theirs = {module.module_class: module.protected for module in other.modules}
        if any(cls in ours and ours[cls] != protected for cls, protected in theirs.items()):
            less = name if any(ours.values()) else "model"
            warnings.warn(
                f"the trainer's model and its {name} have the same rotary modules, and only one of the two "
                f"is protected, so they give different results for the same weights; load the {less} inside "
                "safe_rope.guard() too, which for a model that the trainer loads is around the trainer's "
                "constructor",
                PrecisionWarning,
                stacklevel=3,
            )
