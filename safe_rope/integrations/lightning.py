"""A callback for Lightning's Trainer: no training on damaged position tables."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # the package's older name

from safe_rope.integrations.checked import Checked


class SafeRopeLightningCallback(Checked, Callback):  # type: ignore[misc]
    """Audits the module when training begins, logs what it found, and ends the run if tables are damaged.

        Trainer(callbacks=[SafeRopeLightningCallback()], ...)

    Lightning calls it after its strategy has moved, cast and wrapped the module. The rest is as for
    `SafeRopeCallback`: the option ``action``, the attribute ``report``, and the names that its loggers get.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure what the strategy trains.

        Raises:
            DamagedTablesError: a position table is damaged, or nobody can tell; names it, and says where the
                damage comes from.
        """
        logs = self._measure(trainer.strategy.model or pl_module)
        for logger in trainer.loggers:
            logger.log_metrics(logs, step=trainer.global_step)
        self._judge()
