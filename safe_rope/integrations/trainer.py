"""A callback for transformers' Trainer: no training on damaged position tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from safe_rope.integrations.checked import Checked

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments


class SafeRopeCallback(Checked, TrainerCallback):
    """Audits the model when training begins, logs what it found, and ends the run if tables are damaged.

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
            DamagedTablesError: a position table is damaged, or nobody can tell; names it, and says where the
                damage comes from.
        """
        if model is None:
            return
        logs = self._measure(model)
        state.log_history.append({**logs, "step": state.global_step})
        # A callback is not given what calls it, and what reports to wandb and its like is called by that.
        frame: Any = sys._getframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
            frame = frame.f_back
        if frame is not None:
            frame.f_locals["self"].on_log(args, state, control, logs)
        self._judge()
