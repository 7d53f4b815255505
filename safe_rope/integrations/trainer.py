"""A callback for transformers' Trainer: no training on damaged position tables."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from safe_rope._audit.model import AuditReport, audit
from safe_rope._protection.report import is_main_rank

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class SafeRopeCallback(TrainerCallback):
    """Audits the model when training begins, and fails the run on every rank if a position table is wrong.

        Trainer(model=model, args=args, callbacks=[SafeRopeCallback()], ...)

    The Trainer calls it after it has wrapped the model, so that what DeepSpeed, FSDP or accelerate did to
    the tables is seen. It measures and changes nothing: to prevent the damage, open `safe_rope.guard`
    around the lines that build the model, or start the script with ``safe-rope run``.

    Attributes:
        report: the `AuditReport` of the last training that began; None before.
    """

    def __init__(self) -> None:
        self.report: AuditReport | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Measure ``model``.

        Raises:
            DamagedTablesError: a position table is wrong; names it, and says where the damage comes from.
        """
        if model is None:
            return
        self.report = audit(model)
        self.report.raise_if_damaged()
        if is_main_rank():
            unknown = [f.describe() for f in self.report.findings if f.severity == "unknown"]
            level = logging.WARNING if unknown else logging.INFO
            checked = f"{len(self.report.modules)} rotary module(s) audited before training"
            logger.log(level, "%s: %s", checked, "; ".join(unknown) or "none is damaged")
