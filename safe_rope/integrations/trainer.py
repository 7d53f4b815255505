"""A callback for transformers' Trainer: no training on damaged position tables."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from safe_rope._audit.model import AuditReport, audit
from safe_rope._protection.report import is_main_rank
from safe_rope.errors import ConfigError, PrecisionWarning

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class SafeRopeCallback(TrainerCallback):
    """Audits the model when training begins, logs what it found, and ends the run if tables are not right.

        Trainer(model=model, args=args, callbacks=[SafeRopeCallback()], ...)

    The Trainer calls it after it has wrapped the model, so that what DeepSpeed, FSDP or accelerate did to
    the tables is seen. It measures and changes nothing: to prevent the damage, open `safe_rope.guard`
    around the lines that build the model, or start the script with ``safe-rope run``. The Trainer's own log
    gets, as numbers, ``safe_rope/max_phase_error_rad`` and how many modules with positions there are
    (``safe_rope/modules``), are ``protected``, ``damaged`` and ``unknown``.

    Args:
        action: ``"raise"``: a table that is damaged, or of which that cannot be told, ends the run on every
            rank. ``"warn"``: it is a PrecisionWarning on rank 0.

    Attributes:
        report: the `AuditReport` of the last training that began; None before.

    Raises:
        ConfigError: ``action`` is neither.
    """

    def __init__(self, action: Literal["raise", "warn"] = "raise") -> None:
        if action not in ("raise", "warn"):
            raise ConfigError(f'action must be "raise" or "warn", got {action!r}')
        self.action = action
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
            DamagedTablesError: a position table is wrong, or nobody can tell; names it, and says where the
                damage comes from.
        """
        if model is None:
            return
        self.report = report = audit(model)
        self._log(args, state, control)
        if self.action == "raise":
            report.raise_if_damaged(unknown=True)
        elif not report.ok and is_main_rank():
            warnings.warn(str(report), PrecisionWarning, stacklevel=2)
        if report.ok and is_main_rank():
            logger.info(
                "%d module(s) with positions audited before training: none is damaged", len(report.modules)
            )

    def _log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        assert self.report is not None
        modules = self.report.modules
        verdicts = Counter(module.verdict for module in modules)
        found = {
            "max_phase_error_rad": self.report.max_phase_error_rad,
            "modules": len(modules),
            "protected": sum(module.protected for module in modules),
            "damaged": verdicts["damaged"],
            "unknown": verdicts["unknown"],
        }
        logs = {f"safe_rope/{name}": value for name, value in found.items()}
        state.log_history.append({**logs, "step": state.global_step})
        # A callback is not given what calls it, and what reports to wandb and its like is called by that.
        frame: Any = sys._getframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
            frame = frame.f_back
        if frame is not None:
            frame.f_locals["self"].on_log(args, state, control, logs)
