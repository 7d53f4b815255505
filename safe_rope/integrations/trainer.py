"""A callback for transformers' Trainer: no training on damaged position tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from safe_rope._audit.model import audit
from safe_rope._audit.report import AuditReport
from safe_rope.integrations.checked import Checked

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class SafeRopeCallback(Checked, TrainerCallback):
    """Audits the model when training begins, logs what it found, and ends the run if tables are damaged.

        Trainer(model=model, args=args, callbacks=[SafeRopeCallback()], ...)

    The Trainer calls it after it has wrapped the model, so that what DeepSpeed, FSDP or accelerate did to
    the tables is seen. It measures and changes nothing: to prevent the damage, open `safe_rope.guard`
    around the lines that build the model, or start the script with ``safe-rope run``. The Trainer's own log
    gets, as numbers, ``safe_rope/max_phase_error_rad`` and how many modules with positions there are
    (``safe_rope/modules``), are ``protected``, ``damaged`` and ``unknown``.

    TRL's trainers hold more models: a reference, a teacher, reward models. They are measured as well. One
    with rotary modules like those of the model has to have the same tables; if only one of the two is
    protected, that is a PrecisionWarning on rank 0.

    Args:
        action: ``"raise"``: a table that is damaged, or of which that cannot be told, ends the run on every
            rank. ``"warn"``: it is a PrecisionWarning on rank 0.

    Attributes:
        report: the `AuditReport` of the last training that began; None before.
        others: the reports of the other models that the Trainer holds, by the attribute that holds them.

    Raises:
        ConfigError: ``action`` is neither.
    """

    def __init__(self, action: Literal["raise", "warn"] = "raise") -> None:
        super().__init__(action)
        self.others: dict[str, AuditReport] = {}

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
        handler, trainer = _callers()
        if handler is not None:
            handler.on_log(args, state, control, logs)
        self._judge()
        self.others = {name: audit(other) for name, other in _held(trainer, model)}
        for name, report in self.others.items():
            self._judge_other(name, report)


def _callers() -> tuple[Any, Any]:
    """The handler that calls the callbacks, and its Trainer: a callback is given neither.

    What reports to wandb and its like is called by the handler.
    """
    handler = None
    frame: Any = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if handler is None and isinstance(caller, CallbackHandler):
            handler = caller
        elif handler is not None and getattr(caller, "__dict__", {}).get("callback_handler") is handler:
            return handler, caller
        frame = frame.f_back
    return handler, None


def _held(trainer: Any, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The models among ``trainer``'s attributes, alone or in a list, that share no module with ``model``."""
    seen = set(map(id, model.modules()))
    for name, value in [] if trainer is None else list(vars(trainer).items()):
        several = isinstance(value, (list, tuple))
        for index, other in enumerate(value if several else [value]):
            if isinstance(other, nn.Module) and seen.isdisjoint(map(id, other.modules())):
                seen.update(map(id, other.modules()))
                yield f"{name}[{index}]" if several else name, other
